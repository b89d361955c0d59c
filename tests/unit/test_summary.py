"""The account of a run: step log, totals, summary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from odb_workflow.runtime.errors import UserError
from odb_workflow.training.agreement import AllRanksError, RankCounts, Ranks
from odb_workflow.training.arguments import parse_arguments
from odb_workflow.training.audit import audit_epoch, summarize
from odb_workflow.training.book import StepBook, Totals
from odb_workflow.training.loss_scaling import MicroBatchCounts
from odb_workflow.training.output import begin_training, check_folder, write_checkpoint_record
from odb_workflow.training.resume import differing
from odb_workflow.training.step_log import StepLog
from odb_workflow.training.steps import MicroBatch, Step
from odb_workflow.training.summary import training_summary

CPU = torch.device("cpu")
# Every field that the design names, and those that the comparison reads.
PROMISED = [
    "loader",
    "global_step",
    "emitted_samples",
    "mean_emitted_samples_per_step",
    "effective_emitted_samples_per_second",
    "runtime_seconds",
    "train_loss",
    "world_size",
    "split",
    "token_budget",
    "buffer_size",
    "loss_scaling",
    "join",
    "arm",
    "real_tokens",
    "padded_tokens",
    "padding_ratio",
    "label_tokens",
    "data_wait_seconds",
    "startup_seconds",
    "peak_memory_bytes",
    "peak_memory_bytes_gpu",
    "real_tokens_per_second",
    "optimizer_steps",
    "epochs",
    "samples_audit",
    "versions",
    "device",
    "precision",
    "performance_switches",
    "schedule_basis",
    "git_commit",
    "started",
    "ended",
    "command",
    "code_version",
]


def step(rows: list[int], real: int, padded: int, labels: int) -> Step:
    micro = MicroBatch({}, np.array(rows), MicroBatchCounts(labels, real), padded, None)
    mine = RankCounts(1, len(rows), real, padded, labels)
    return Step([micro], Ranks(0, 1).agree(mine), data_wait_seconds=0.25)


def book(written: list[dict], every: int = 1) -> StepBook:
    names = lambda rows: [f"id-{row} (source)" for row in rows]  # noqa: E731
    return StepBook(Ranks(0, 1), every, CPU, write=written.append, name_rows=names)


def test_totals_are_means_over_label_tokens() -> None:
    """Summed losses of 30 and 20 over 10 and 40 label tokens: 50 / 50, not the mean of 3.0 and 0.5."""
    written: list[dict] = []
    one = book(written, every=2)
    one.note(step([1, 2], 80, 20, 10), 0, 1e-3, [torch.tensor(30.0)], 1.5)
    assert written == []
    one.note(step([3], 60, 0, 40), 0, 2e-3, [torch.tensor(15.0), torch.tensor(5.0)], torch.tensor(2.5))
    assert [entry["loss"] for entry in written] == [3.0, 0.5]
    assert [entry["grad_norm"] for entry in written] == [1.5, 2.5]
    assert [entry["samples_total"] for entry in written] == [2, 3]
    assert one.totals.mean_loss == 1.0
    assert (one.totals.real_tokens, one.totals.padded_tokens, one.totals.label_tokens) == (140, 20, 50)
    assert one.totals.data_wait_seconds == 0.5
    wanted = {
        "step",
        "epoch",
        "samples",
        "real_tokens",
        "padded_tokens",
        "label_tokens",
        "loss",
        "lr",
        "grad_norm",
    }
    wanted |= {
        "step_ms",
        "data_wait_ms",
        "compile_ms",
        "peak_memory_bytes",
        "elapsed_seconds",
        "micro_batch_sizes",
    }
    assert wanted <= written[0].keys()


@pytest.mark.parametrize(
    ("loss", "norm", "message"),
    [
        (float("nan"), 1.0, "the loss of step 2 is nan"),
        (float("inf"), 1.0, "the loss of step 2 is inf"),
        (1.0, float("inf"), "the gradient norm of step 2 is inf"),
    ],
)
def test_numbers_that_are_none_stop_the_run(loss: float, norm: float, message: str) -> None:
    one = book([], every=3)
    one.note(step([1], 5, 0, 2), 0, 1e-3, [torch.tensor(1.0)], 1.0)
    one.note(step([7, 8], 5, 0, 2), 0, 1e-3, [torch.tensor(loss)], norm)
    with pytest.raises(AllRanksError, match=message) as caught:
        one.flush()
    assert "id-7 (source), id-8 (source)" in str(caught.value)
    assert "id-1" not in str(caught.value)


@pytest.mark.parametrize(("skipped", "fine"), [(0, True), (1, True), (2, False)])
def test_a_run_of_which_every_step_was_skipped_is_an_error(skipped: int, fine: bool) -> None:
    one = book([], every=1)
    one.totals.step, one.totals.skipped_steps = 2, skipped
    if fine:
        one.check_learned()
    else:
        with pytest.raises(AllRanksError, match="all 2 steps were skipped"):
            one.check_learned()


def test_the_step_log_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    log = StepLog(tmp_path, keep_steps=0)
    for number in (1, 2, 3):
        log.write({"step": number, "loss": float("nan")})
    log.close()
    path = tmp_path / "step_log.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')  # killed while writing
    again = StepLog(tmp_path, keep_steps=2)
    again.write({"step": 3, "loss": 1.0})
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["loss"] is None


@pytest.mark.parametrize("loader", ["odb", "standard"])
def test_the_summary_has_every_promised_field(loader: str) -> None:
    args = parse_arguments(["--model", "m", "--loader", loader, "--fixed-batch-size", "8"])
    totals = Totals(step=4, samples=30, real_tokens=900, padded_tokens=100, label_tokens=300, loss_sum=600.0)
    totals.runtime_seconds = 10.0
    audit = summarize([audit_epoch(0, np.arange(30), [np.arange(30)], [], finished=True)])
    summary = training_summary(
        args,
        totals,
        ending="finished",
        audit=audit,
        split={"train_samples": 30},
        world_size=1,
        device=CPU,
        switches={"mode": "fast"},
        startup_seconds=2.0,
        started="2026-01-01T00:00:00+00:00",
        resumed_at_step=None,
        trained={},
        code_version=1,
        over_budget_samples=3,
        deepspeed_stage=None,
    )
    assert [name for name in PROMISED if name not in summary] == []
    assert summary["train_loss"] == 2.0
    assert summary["effective_emitted_samples_per_second"] == 3.0
    assert summary["mean_emitted_samples_per_step"] == 7.5
    assert summary["padding_ratio"] == 0.1
    assert (summary["token_budget"], summary["fixed_batch_size"]) == (
        (12288, None) if loader == "odb" else (None, 8)
    )
    assert {
        "expected",
        "distinct",
        "padding_duplicates",
        "missing",
        "lost",
        "doubled",
        "ids_sha256",
        "complete",
    } <= (summary["samples_audit"].keys())


def test_the_folder_of_an_arm(tmp_path: Path) -> None:
    """Claimed by one model and arm; a new training clears it; the record names every file with its hash."""
    out = tmp_path / "odb"
    check_folder(out, "models/a", "odb")
    begin_training(out, "models/a", "odb")
    check_folder(out, "models/a", "odb")
    with pytest.raises(UserError, match="model models/a"):
        check_folder(out, "models/b", "odb")
    (out / "checkpoint").mkdir()
    (out / "checkpoint" / "config.json").write_text("{}")
    record = write_checkpoint_record(out, "odb", "models/a", saved=True)
    assert record["files"] == [
        {
            "path": "config.json",
            "bytes": 2,
            "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        }
    ]
    (out / "mmmu_mc_likelihood_accelerate").mkdir()
    (out / "keep.txt").write_text("mine")
    begin_training(out, "models/a", "odb")
    assert sorted(path.name for path in out.iterdir()) == [".arm_identity.json", "keep.txt"]
    assert write_checkpoint_record(out, "odb", "models/a", saved=False)["files"] == []


def test_differences_are_named_by_their_leaf() -> None:
    old = {"arguments": {"lr": 1e-3, "seed": 1}, "world_size": 1}
    new = {"arguments": {"lr": 1e-4, "seed": 1}, "world_size": 2}
    assert differing(old, new) == [
        "arguments.lr: recorded 0.001, now 0.0001",
        "world_size: recorded 1, now 2",
    ]
