"""A training that was killed or stopped goes on by the same command, and leaves no process behind."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_runs import (
    PROGRAM,
    SIGINT,
    SIGKILL,
    SIGTERM,
    TrainingInput,
    free_port,
    launched,
    processes_of,
    soon,
    start,
    trained,
)

pytestmark = pytest.mark.distributed

STANDARD = "--loader standard --fixed-batch-size 2 --epochs 2 --checkpoint-every-samples 10"
ODB = "--loader odb --token-budget 300 --buffer-size 16 --no-warmup-buffer --prefetch-factor 16 --epochs 2"
DS = f"{STANDARD} --deepspeed-config {PROGRAM.parent.parent / 'config' / 'ds_z2.json'}"


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoint" / "model.safetensors")


def assert_equal_weights(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def assert_each_sample_once(summary: dict, padding_duplicates: int = 0) -> None:
    audit = summary["samples_audit"]
    assert (audit["expected"], audit["distinct"]) == (108, 108)
    assert (audit["lost"], audit["doubled"], audit["complete"]) == (0, 0, True)
    assert audit["padding_duplicates"] <= padding_duplicates
    assert summary["emitted_samples"] == 108 + audit["padding_duplicates"]


@pytest.mark.parametrize("flags", [STANDARD, pytest.param(DS, id="zero-2")])
def test_killed_and_continued_gives_the_same_weights(
    given: TrainingInput, tmp_path: Path, flags: str
) -> None:
    if "deepspeed" in flags and not shutil.which("c++"):
        pytest.skip("DeepSpeed on CPU needs a C++ compiler")
    whole = trained(given, tmp_path / "whole" / "standard", flags)
    out = tmp_path / "killed" / "standard"
    killed = start(given, out, flags).signal_after(23, SIGKILL)
    assert killed.statuses == [-SIGKILL]
    assert not (out / "checkpoint.json").exists()
    at = json.loads((out / "resume" / "latest.json").read_text())["folder"]
    again = trained(given, out, flags)
    assert again.summary["resumed_at_step"] == int(at.removeprefix("step-")) >= 18
    assert f"continuing after step {again.summary['resumed_at_step']}" in again.log
    assert "left anew" not in again.log
    assert_each_sample_once(again.summary)
    assert [step["step"] for step in again.steps] == list(range(1, 55))
    assert [step["loss"] for step in again.steps] == [step["loss"] for step in whole.steps]
    assert again.summary["train_loss"] == whole.summary["train_loss"]
    assert again.summary["samples_audit"]["ids_sha256"] == whole.summary["samples_audit"]["ids_sha256"]
    assert_equal_weights(out, whole.out)
    assert not (out / "resume").exists()


def test_another_runs_resume_point_is_moved_aside_and_named(given: TrainingInput, tmp_path: Path) -> None:
    out = tmp_path / "standard"
    start(given, out, STANDARD).signal_after(12, SIGKILL)
    run = trained(given, out, f"{STANDARD} --lr 5e-4 --num-workers 2")
    assert "resume.old-1" in run.log
    assert "arguments.lr: recorded 0.001, now 0.0005" in run.log
    assert "num_workers" not in run.log
    assert run.summary["resumed_at_step"] is None
    assert_each_sample_once(run.summary)
    assert (out / "resume.old-1" / "latest.json").exists()


@pytest.mark.parametrize(
    ("ranks", "number", "status"), [(1, SIGTERM, 143), (1, SIGINT, 130), (2, SIGTERM, 143)]
)
def test_odb_stopped_by_a_signal_continues(
    given: TrainingInput, tmp_path: Path, ranks: int, number: int, status: int
) -> None:
    """The step in progress is finished and kept; the epoch goes on with the samples it has left."""
    out = tmp_path / "odb"
    stopped = start(given, out, ODB, ranks).signal_after(5, number)
    assert set(stopped.statuses) == {status}
    assert "Traceback" not in stopped.log
    assert stopped.log.count("the same command continues") == 1
    assert multiprocessing.active_children() == []
    kept = len(stopped.steps)
    again = trained(given, out, ODB, ranks)
    assert again.summary["resumed_at_step"] == kept
    assert again.log.count("groups the samples that are left anew") == 1, "nobody expects equal weights"
    assert_each_sample_once(again.summary, padding_duplicates=3 * (ranks - 1))


def test_no_process_outlives_its_launcher(given: TrainingInput, tmp_path: Path) -> None:
    """torchrun killed, accelerate launch stopped: the ranks keep a resume point and end, loaders and all."""
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    accelerate = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1"]
    cases = {tmp_path / "torchrun": (torchrun, SIGKILL), tmp_path / "accelerate": (accelerate, SIGTERM)}
    started = {
        out: launched(given, out, launcher, ODB + " --epochs 20") for out, (launcher, _) in cases.items()
    }
    for out, process in started.items():
        log = out / "step_log.jsonl"
        assert soon(lambda log=log: log.exists() and log.read_text().count("\n") > 3, 120), process.poll()
        assert len(processes_of(out)) >= 4
        process.send_signal(cases[out][1])
        process.wait(30)
    for out, process in started.items():
        assert soon(lambda out=out: not processes_of(out)), processes_of(out)
        assert (out / "resume" / "latest.json").exists()
        process.stderr.close()


def test_a_stop_of_the_whole_job_keeps_a_resume_point(given: TrainingInput, tmp_path: Path) -> None:
    """As the rules start it: Ctrl-C becomes SIGTERM to every process of the job's group."""
    out, launch = tmp_path / "job", str(PROGRAM.parent / "launch.py")
    launcher = [launch, "--processes", "1", "--gpus", "0", "--threads", "1", "--"]
    process = launched(given, out, launcher, ODB + " --epochs 20")
    log = out / "step_log.jsonl"
    assert soon(lambda: log.exists() and log.read_text().count("\n") > 3, 120), process.poll()
    process.send_signal(SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 143, told
    assert "the same command continues" in told and "killed by signal" not in told
    kept = json.loads((out / "resume" / "latest.json").read_text())
    assert kept
    assert log.read_text().count("\n") > 3
    assert soon(lambda: not processes_of(out)), processes_of(out)


def test_a_finished_arm_is_trained_anew(given: TrainingInput, tmp_path: Path) -> None:
    """Old weights and evaluations go before the first step of a new training."""
    out = tmp_path / "standard"
    trained(given, out, "--loader standard --max-steps 1")
    old = out / "eval_out_accelerate_valloss" / "eval_results.json"
    old.parent.mkdir()
    old.write_text("{}")
    run = start(given, out, f"{STANDARD} --epochs 0.5")
    assert soon(lambda: len(run.steps) > 0 and not old.exists())
    time.sleep(0.05)
    assert not (out / "checkpoint.json").exists()
    assert not (out / "checkpoint").exists()
    run.wait()
    assert run.statuses == [0]
    assert (out / "checkpoint" / "config.json").exists()


def test_a_training_that_had_ended_is_published_and_not_trained_again(
    given: TrainingInput, tmp_path: Path
) -> None:
    """Snakemake deletes the outputs of a training whose end it did not see, and gives the same command."""
    flags, out = "--loader standard --fixed-batch-size 6", tmp_path / "standard"
    trained(given, out, flags, ranks=2)
    declared = [out / name for name in ("train_summary_standard.json", "step_log.jsonl", "checkpoint.json")]
    before = [file.read_bytes() for file in declared]
    for file in declared:
        file.unlink()
    again = trained(given, out, flags, ranks=2)
    assert "this training had ended before: its results are published" in again.log
    assert [file.read_bytes() for file in declared] == before
