"""Trainings whose fixed batch size was found before the first step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import train_accelerate
from odb_workflow.training import batch_size
from test_train_resume import assert_equal_weights
from train_runs import SIGKILL, Run, TrainingInput, fork_ranks, start, trained

pytestmark = pytest.mark.distributed

AUTO = "--loader standard --fixed-batch-size auto --epochs 1"


def limited(
    given: TrainingInput, out: Path, flags: str, sizes: list[int], ranks: int = 1, killed_after: int = 0
) -> Run:
    """A training whose rank r finds that ``sizes[r]`` samples fit; the steps are rehearsed all the same."""

    def main() -> int:
        size = sizes[int(os.environ.get("RANK", "0"))]
        real = batch_size.StepRehearsal.fits
        batch_size.StepRehearsal.fits = lambda self, tried: real(self, tried) and tried <= size
        return train_accelerate.main()

    argv = [*given.flags(), "--output-dir", str(out), *flags.split()]
    run = fork_ranks(main, argv, out, ranks, {})
    return run.signal_after(killed_after, SIGKILL) if killed_after else run.wait()


def test_auto_that_finds_eight_trains_as_eight_does(given: TrainingInput, tmp_path: Path) -> None:
    fixed = trained(given, tmp_path / "fixed" / "standard", AUTO.replace("auto", "8"))
    found = limited(given, tmp_path / "auto" / "standard", AUTO, [8])
    assert found.statuses == [0], found.log[-3000:]
    assert found.summary["fixed_batch_size"] == fixed.summary["fixed_batch_size"] == 8
    assert set(found.summary["batch_size_search"]["tried"]) == {"1", "2", "4", "8", "16", "12", "10", "9"}
    assert fixed.summary["batch_size_search"] is None
    assert "fixed batch size 8 (of at most 54)" in found.log
    assert [step["loss"] for step in found.steps] == [step["loss"] for step in fixed.steps]
    assert_equal_weights(found.out, fixed.out)


def test_a_resumed_training_keeps_the_size(given: TrainingInput, tmp_path: Path) -> None:
    out, flags = tmp_path / "standard", f"{AUTO} --checkpoint-every-samples 10"
    whole = trained(given, tmp_path / "whole" / "standard", flags.replace("auto", "3"))
    limited(given, out, flags, [3], killed_after=8)
    again = limited(given, out, flags, [5])  # more memory is free now
    assert again.statuses == [0], again.log[-3000:]
    assert again.summary["resumed_at_step"] > 0
    assert again.summary["fixed_batch_size"] == 3
    assert again.summary["batch_size_search"]["per_rank"] == [3]
    assert_equal_weights(out, whole.out)


def test_ranks_agree_on_the_smallest_and_nothing_limits_but_the_samples(
    given: TrainingInput, tmp_path: Path
) -> None:
    two = limited(given, tmp_path / "two" / "standard", AUTO, [6, 4], ranks=2)
    assert two.statuses == [0, 0], two.log[-3000:]
    assert (two.summary["fixed_batch_size"], two.summary["batch_size_search"]["per_rank"]) == (4, [6, 4])
    few = start(given, tmp_path / "few" / "standard", f"{AUTO} --train-size 5").wait()
    assert few.statuses == [0], few.log[-3000:]
    assert few.summary["fixed_batch_size"] == 5
