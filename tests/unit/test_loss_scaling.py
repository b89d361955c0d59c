"""Factors of the summed loss, compared with worked examples."""

from __future__ import annotations

import pytest
from odb_workflow.training.loss_scaling import MicroBatchCounts, loss_factor

# Two ranks with 900/20 and 300/280 input/label tokens and mean losses 2.0 and 1.0. The true mean over label
# tokens is (20 * 2 + 280 * 1) / 300 = 1.0667; weights by input tokens give 1.75.
RANKS = [
    MicroBatchCounts(20, 900, odb_scale=900 / 1200 * 2),
    MicroBatchCounts(280, 300, odb_scale=300 / 1200 * 2),
]
MEANS = [2.0, 1.0]


def averaged(mode: str, ranks: list[MicroBatchCounts]) -> float:
    """What DDP makes of the ranks' scaled losses: their average."""
    total = 0.0
    for counts, mean in zip(ranks, MEANS, strict=True):
        factor = loss_factor(
            mode, counts, step_label_tokens=300, step_real_tokens=1200, micro_batches=1, world_size=2
        )
        total += mean * counts.label_tokens * factor
    return total / 2


@pytest.mark.parametrize(
    ("mode", "right"), [("label_tokens", 320 / 300), ("exact", 1.75), ("approx", 1.75), ("none", 1.5)]
)
def test_two_ranks(mode: str, right: float) -> None:
    assert averaged(mode, RANKS) == pytest.approx(right)


def test_exact_without_odb_is_the_share_of_input_tokens() -> None:
    plain = [MicroBatchCounts(counts.label_tokens, counts.real_tokens) for counts in RANKS]
    assert averaged("exact", plain) == pytest.approx(1.75)


def test_accumulation_is_part_of_the_mean() -> None:
    """One rank, two micro-batches with 10 and 30 label tokens: the step is their mean over 40 tokens."""
    micros, sums = [MicroBatchCounts(10, 50), MicroBatchCounts(30, 60)], [20.0, 15.0]
    step = {"step_label_tokens": 40, "step_real_tokens": 110, "micro_batches": 2, "world_size": 1}
    pairs = list(zip(sums, micros, strict=True))
    assert sum(s * loss_factor("label_tokens", m, **step) for s, m in pairs) == pytest.approx(35 / 40)
    assert sum(s * loss_factor("none", m, **step) for s, m in pairs) == pytest.approx((2.0 + 0.5) / 2)


def test_a_rank_without_label_tokens_adds_nothing() -> None:
    counts = MicroBatchCounts(0, 100)
    for mode in ("label_tokens", "exact", "none"):
        factor = loss_factor(
            mode, counts, step_label_tokens=5, step_real_tokens=200, micro_batches=1, world_size=2
        )
        assert factor * 0.0 == 0.0
