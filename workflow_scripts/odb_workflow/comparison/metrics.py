"""The metrics of the comparison: one table that every output (JSON, CSV, Markdown, page, figures) follows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

TRAINING = "training"
VALIDATION = "validation"
BENCHMARK = "benchmark"

MISSING_TEXT = "missing"
NON_FINITE_TEXT = "not finite"


@dataclass(frozen=True)
class Metric:
    """One number per run.

    Attributes:
        key: Name in ``comparison.json``.
        label: Column heading, without the unit.
        unit: Unit shown beside the label; empty for a pure number.
        stage: ``training``, ``validation`` or ``benchmark``: the result file it comes from.
        digits: Digits after the decimal point when shown.
        factor: What the stored value is multiplied with before it is shown (100 for percent).
        required: A finished run without it, or with a non-finite value, is a fault.
        better: ``higher``, ``lower`` or empty where neither is better as such.
    """

    key: str
    label: str
    unit: str
    stage: str
    digits: int
    factor: float = 1.0
    required: bool = True
    better: str = ""

    def show(self, value: Any) -> str:
        """The value as text, factor applied; ``missing`` or ``not finite`` where it is no number."""
        if value is None:
            return MISSING_TEXT
        if not math.isfinite(value):
            return NON_FINITE_TEXT
        return f"{value * self.factor:,.{self.digits}f}"

    @property
    def heading(self) -> str:
        """Label and unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


METRICS: tuple[Metric, ...] = (
    Metric("runtime_seconds", "Training time", "s", TRAINING, 1, better="lower"),
    Metric("samples_per_second", "Throughput", "samples/s", TRAINING, 2, better="higher"),
    Metric("real_tokens_per_second", "Real tokens", "tokens/s", TRAINING, 0, better="higher"),
    Metric("padding_ratio", "Padding", "%", TRAINING, 1, factor=100, better="lower"),
    Metric("optimizer_steps", "Optimizer steps", "", TRAINING, 0),
    Metric("samples_per_step", "Samples per step", "", TRAINING, 2),
    Metric("emitted_samples", "Samples", "", TRAINING, 0),
    Metric("train_loss", "Training loss, mean over the training", "nat", TRAINING, 4, better="lower"),
    Metric("eval_loss", "Val. loss per sample", "nat", VALIDATION, 4, better="lower"),
    Metric("token_weighted_eval_loss", "Val. loss per token", "nat", VALIDATION, 4, better="lower"),
    Metric("eval_samples", "Validation samples", "", VALIDATION, 0),
    Metric("mmmu_accuracy", "MMMU-MC", "%", BENCHMARK, 2, factor=100, better="higher"),
    Metric("mmmu_standard_error", "MMMU-MC std. error", "points", BENCHMARK, 2, factor=100),
    Metric("mmmu_n", "MMMU-MC n", "", BENCHMARK, 0),
    Metric("data_wait_share", "Data wait", "% of time", TRAINING, 1, 100, required=False),
    Metric("startup_seconds", "Start-up", "s", TRAINING, 1, required=False),
    Metric("peak_memory_bytes", "Peak memory", "GiB", TRAINING, 2, factor=1 / 2**30, required=False),
)
BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}


def is_finite(value: Any) -> bool:
    """True for a real number that is neither NaN nor infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
