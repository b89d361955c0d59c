"""From the sum of token losses of a micro-batch to the number whose gradient is averaged over ranks.

DDP and ZeRO average gradients over ranks, so that every factor here carries the world size.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatchCounts:
    """What the scale of one micro-batch depends on.

    Attributes:
        label_tokens: label tokens of this micro-batch.
        real_tokens: input tokens of this micro-batch.
        odb_scale: ``ODBStepInfo.loss_scale``; None for other loaders.
    """

    label_tokens: int
    real_tokens: int
    odb_scale: float | None = None


def loss_factor(
    mode: str,
    micro: MicroBatchCounts,
    *,
    step_label_tokens: int,
    step_real_tokens: int,
    micro_batches: int,
    world_size: int,
) -> float:
    """The factor for the SUM of token losses of one micro-batch.

    ``label_tokens``: the step's gradient is the mean over all label tokens of all ranks and micro-batches.
    ``exact`` and ``approx``: the micro-batch's mean loss times odb's scale (its share of input tokens times
    the world size); other loaders use the exact share of input tokens. ``none``: the plain mean of means.

    Args:
        step_label_tokens, step_real_tokens: over all ranks and micro-batches of the optimizer step.
        micro_batches: micro-batches of each rank in the step.
    """
    if mode == "label_tokens":
        return world_size / step_label_tokens if step_label_tokens else 0.0
    mean = 1.0 / micro.label_tokens if micro.label_tokens else 0.0
    if mode == "none":
        return mean / micro_batches
    if micro.odb_scale is not None:
        return mean * float(micro.odb_scale) / micro_batches
    return mean * micro.real_tokens / step_real_tokens * world_size
