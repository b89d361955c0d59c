"""The learning rate as a function of progress."""

from __future__ import annotations

import math

import pytest
from odb_workflow.training.schedule import Schedule


def curve(schedule: Schedule, sizes: list[int]) -> list[tuple[float, float]]:
    """(progress, rate) of every step, for steps of these sizes."""
    done, points = 0, []
    for step, size in enumerate(sizes):
        progress = schedule.progress(done, size, step)
        points.append((progress, schedule.rate(progress)))
        done += size
    return points


def test_the_first_step_is_on_the_warm_up_and_the_last_one_still_moves() -> None:
    schedule = Schedule(peak=1.0, warmup_ratio=0.1, kind="cosine", total=100)
    rates = [rate for _, rate in curve(schedule, [10] * 10)]
    assert rates[0] == pytest.approx(0.5)  # progress 0.05 of a warm-up that ends at 0.1
    assert rates[1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.05 / 0.9)))
    assert rates[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.85 / 0.9)))
    assert rates[1:] == sorted(rates[1:], reverse=True)


@pytest.mark.parametrize(
    ("kind", "middle", "end"), [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1, 1)]
)
def test_shapes(kind: str, middle: float, end: float) -> None:
    schedule = Schedule(peak=2.0, warmup_ratio=0.0, kind=kind, total=1)
    assert schedule.rate(0.0) == 2.0
    assert schedule.rate(0.5) == pytest.approx(2.0 * middle)
    assert schedule.rate(1.0) == pytest.approx(2.0 * end)


def test_the_curve_does_not_depend_on_step_sizes() -> None:
    """One rank with steps of 2, two ranks with steps of 4, and unequal steps walk the same curve."""
    schedule = Schedule(peak=1e-3, warmup_ratio=0.2, kind="cosine", total=40)
    for sizes in ([2] * 20, [4] * 10, [1, 7, 3, 9, 4, 6, 5, 5]):
        for progress, rate in curve(schedule, sizes):
            assert rate == schedule.rate(progress)
    small, large = curve(schedule, [2] * 20), curve(schedule, [4] * 10)
    for number, (progress, _) in enumerate(large):
        assert progress == pytest.approx((small[2 * number][0] + small[2 * number + 1][0]) / 2)


def test_max_steps_reaches_the_end_of_the_curve() -> None:
    schedule = Schedule(peak=1.0, warmup_ratio=0.0, kind="linear", total=1_000_000, max_steps=4)
    assert [rate for _, rate in curve(schedule, [3] * 4)] == pytest.approx([0.875, 0.625, 0.375, 0.125])


def test_progress_stays_in_bounds() -> None:
    schedule = Schedule(peak=1.0, warmup_ratio=0.1, kind="linear", total=10)
    assert schedule.progress(11, 3, 5) == 1.0  # padding duplicates go beyond the planned total
    assert schedule.rate(1.0) == pytest.approx(0.0)
