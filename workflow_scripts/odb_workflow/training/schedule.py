"""The learning rate as a function of progress, the same for every loader.

Progress is counted in emitted samples (or label tokens), not in steps: an arm that takes fewer, larger steps
walks the same curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then decay, over progress in [0, 1].

    Attributes:
        peak: learning rate at the end of the warm-up.
        warmup_ratio: share of the training over which the rate rises from 0.
        kind: ``cosine`` (to 0), ``linear`` (to 0) or ``constant``.
        total: samples or label tokens of the whole training.
        max_steps: where above 0, progress is at least the share of these steps.
    """

    peak: float
    warmup_ratio: float
    kind: str
    total: float
    max_steps: int = 0

    def progress(self, done: float, this_step: float, step: int) -> float:
        """Progress in the middle of a step, in [0, 1].

        The middle makes the first step's rate above 0, the last one's too, and the curve the same for small
        and large steps.

        Args:
            done: samples (or label tokens) of the steps before.
            this_step: samples (or label tokens) of this step, over all ranks.
            step: number of steps before.
        """
        progress = (done + this_step / 2) / self.total if self.total else 0.0
        if self.max_steps:
            progress = max(progress, (step + 0.5) / self.max_steps)
        return min(max(progress, 0.0), 1.0)

    def rate(self, progress: float) -> float:
        """The learning rate at ``progress``."""
        if progress < self.warmup_ratio:
            return self.peak * progress / self.warmup_ratio
        after = (progress - self.warmup_ratio) / (1 - self.warmup_ratio)
        if self.kind == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * after))
        return self.peak * (1 - after) if self.kind == "linear" else self.peak
