"""The scoring loop without a model: each sample once, memory, faults, restarts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from odb_workflow.evaluation.checkpoint import resolve_checkpoint
from odb_workflow.evaluation.partial import PartialResults
from odb_workflow.evaluation.plan import plan_batches
from odb_workflow.evaluation.ranks import EvaluationRanks
from odb_workflow.evaluation.runner import WorkerSettings, default_workers, score_items
from odb_workflow.runtime.errors import UserError

RANKS = EvaluationRanks(0, 1, 1, torch.device("cpu"))
LENGTHS = [3, 8, 5, 8, 2, 7, 4]


class BadItem(Exception):
    """A fault of the data."""


class Items:
    """Samples whose value is their index; ``broken`` ones cannot be read."""

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.broken = set(broken)

    def __len__(self) -> int:
        return len(LENGTHS)

    def key(self, index: int) -> str:
        return f"id-{index}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise BadItem("the picture is gone")
        return {"index": index, "length": LENGTHS[index]}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    lengths = torch.tensor([sample["length"] for sample in samples])
    return {
        "lengths": lengths,
        "input_ids": torch.zeros(len(samples), int(lengths.max()), dtype=torch.int64),
        "index": torch.tensor([sample["index"] for sample in samples]),
    }


class Scorer:
    """Gives each sample its index times ten; remembers the batches."""

    def __init__(self, limit: int = 99, stop_after: int = 99) -> None:
        self.limit, self.stop_after, self.batches = limit, stop_after, []

    def __call__(self, batch: dict[str, Any]) -> list[list[float]]:
        indices = batch["index"].tolist()
        if len(indices) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(self.batches) >= self.stop_after:
            raise KeyboardInterrupt
        self.batches.append(indices)
        return [[10.0 * index] for index in indices]


def run(tmp_path: Path, scorer: Any, items: Items | None = None, workers: int = 0) -> Any:
    return score_items(
        items or Items(),
        plan_batches(LENGTHS, 16),
        collate,
        scorer,
        ranks=RANKS,
        partial=PartialResults(tmp_path, {"test": 1}),
        loader=WorkerSettings(workers),
        known_errors=(BadItem,),
    )


EXPECTED = {f"id-{index}": [10.0 * index] for index in range(len(LENGTHS))}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_once(tmp_path: Path, workers: int):
    scorer = Scorer()
    statistics = run(tmp_path, scorer, workers=workers)
    assert statistics.values == EXPECTED
    assert scorer.batches == [[1, 3], [5, 2], [6, 0, 4]]
    assert (statistics.samples, statistics.batches, statistics.reused) == (7, 3, 0)
    assert (statistics.real_tokens, statistics.padded_tokens) == (37, 16 + 14 + 12 - 37)


def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path):
    scorer = Scorer(limit=1)
    statistics = run(tmp_path, scorer)
    assert statistics.values == EXPECTED
    assert [len(batch) for batch in scorer.batches] == [1] * 7
    # Two batches of two need one split each, the batch of three needs two.
    assert statistics.split_after_out_of_memory == 4


def test_one_sample_that_does_not_fit_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="does not fit into GPU memory") as caught:
        run(tmp_path, Scorer(limit=0))
    assert caught.value.where == "id-1"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_is_named_without_a_traceback(tmp_path: Path, workers: int):
    with pytest.raises(UserError) as caught:
        run(tmp_path, Scorer(), Items(broken=[2]), workers=workers)
    assert caught.value.what == "a sample cannot be scored: id-2: the picture is gone"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_names_its_sample(tmp_path: Path, value: float):
    def scorer(batch: dict[str, Any]) -> list[list[float]]:
        return [[value if index == 6 else 1.0] for index in batch["index"].tolist()]

    with pytest.raises(UserError, match="not finite") as caught:
        run(tmp_path, scorer)
    assert caught.value.where == "sample id-6"


def test_an_interrupted_run_goes_on_with_the_same_batches(tmp_path: Path):
    first = Scorer(stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    assert first.batches == [[1, 3]]
    second = Scorer()
    statistics = run(tmp_path, second)
    assert second.batches == [[5, 2], [6, 0, 4]]
    assert statistics.values == EXPECTED and statistics.reused == 2


def test_a_cpu_gets_no_workers_and_a_gpu_some():
    assert default_workers(torch.device("cpu"), 1) == 0
    assert 1 <= default_workers(torch.device("cuda"), 1) <= 12
    assert default_workers(torch.device("cuda"), 1000) == 1


@pytest.mark.parametrize(("text", "why"), [("hello\n", "it is not JSON"), ("{}", "it has no model_dir")])
def test_a_file_that_is_no_checkpoint_says_what_to_give(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        resolve_checkpoint(str(file))
    assert why in caught.value.what
    assert caught.value.fix == "give a model folder, the checkpoint.json of an arm or a Hub id"
