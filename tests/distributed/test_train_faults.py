"""What stops a training: one message that says what, where and how to mend it, and nothing broken behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_accelerate
from odb_workflow.training import engines, output
from odb_workflow.training import run as run_module
from train_runs import Run, TrainingInput, fork_ranks, refused, start, trained

pytestmark = pytest.mark.distributed

STANDARD = "--loader standard --fixed-batch-size 4"
ODB = "--loader odb --token-budget 500 --buffer-size 16 --no-warmup-buffer --prefetch-factor 16"


def with_patch(given: TrainingInput, out: Path, flags: str, patch: Callable[[], None], ranks: int = 1) -> Run:
    """A training in a process where ``patch`` ran first."""

    def main() -> int:
        patch()
        return train_accelerate.main()

    argv = [*given.flags(), "--output-dir", str(out), *flags.split()]
    return fork_ranks(main, argv, out, ranks, {}).wait()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model nowhere/at/all", "no model directory nowhere/at/all"),
        ("--data nowhere", "the TMDB not found"),
        ("--validation nowhere", "no finished validation of the dataset"),
        ("--max-length 99", "(max_length 4096, now 99)"),
        ("--image-max-pixels 50000", "another processor, image size or max_length"),
        ("--train-size -1", "--train-size -1: must be 0"),
        ("--trainable-keywords lm_head,nonsense", "'nonsense' matches no parameter"),
        ("--freeze-language-model", "no parameter is trained"),
        ("--precision fp16", "precision fp16 needs a GPU"),
        ("--deepspeed-config nowhere.json", "DeepSpeed configuration not found"),
        ("--performance turbo", "neither auto, reference nor JSON"),
        ("--loader odb --buffer-size 1 --token-budget 500", "buffer size 1 is too small"),
        ("--loader odb --num-workers 0", "the odb loader needs at least 1"),
    ],
)
def test_refused_before_any_work(given: TrainingInput, tmp_path: Path, flags: str, message: str) -> None:
    said = refused(given, tmp_path / "arm", f"{STANDARD} {flags}")
    assert message in said
    assert not (tmp_path / "arm" / "step_log.jsonl").exists()


def test_a_refused_training_leaves_the_finished_one(given: TrainingInput, tmp_path: Path) -> None:
    """A typo on the next command costs nothing; two ranks say it once."""
    out = tmp_path / "arm"
    trained(given, out, f"{STANDARD} --max-steps 1")
    before = sorted(path.name for path in out.rglob("*"))
    assert "matches no parameter" in refused(given, out, f"{STANDARD} --trainable-keywords nonsense")
    assert "lr -1.0" in refused(given, out, f"{STANDARD} --lr -1", ranks=2)
    assert "the TMDB not found" in refused(given, out, f"{STANDARD} --data nowhere", ranks=2)
    assert sorted(path.name for path in out.rglob("*")) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3 is not supported"),
        (
            {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}},
            "optimizer belongs to the training",
        ),
    ],
)
def test_deepspeed_files_that_do_not_fit(
    given: TrainingInput, tmp_path: Path, config: dict, message: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert message in refused(given, tmp_path / "arm", f"{STANDARD} --deepspeed-config {path}")


def test_bf16_without_a_gpu_is_refused_unless_the_cpu_is_meant(given: TrainingInput, tmp_path: Path) -> None:
    flags = [flag for flag in given.flags() if flag != "--cpu"]
    flags += ["--loader", "standard", "--precision", "bf16", "--output-dir", str(tmp_path / "arm")]
    run = fork_ranks(train_accelerate.main, flags, tmp_path / "arm", 1, {"CUDA_VISIBLE_DEVICES": ""}).wait()
    assert run.statuses == [1]
    assert "precision bf16 asks for a GPU, and torch sees none" in run.log
    meant = trained(given, tmp_path / "meant", f"{STANDARD} --precision bf16 --max-steps 3")
    assert (meant.summary["ending"], meant.summary["global_step"]) == ("max_steps", 3)
    assert not meant.summary["samples_audit"]["complete"]
    saved = json.loads((meant.out / "checkpoint" / "config.json").read_text())
    assert saved["dtype"] == "bfloat16"


def test_torch_outside_the_supported_versions(given: TrainingInput, tmp_path: Path) -> None:
    def patch() -> None:
        torch.__version__ = "2.5.1"

    run = with_patch(given, tmp_path / "arm", STANDARD, patch)
    assert run.statuses == [1]
    assert "torch 2.5.1 is older than 2.11" in run.log


def test_a_port_that_is_taken(given: TrainingInput, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        said = refused(given, tmp_path / "arm", STANDARD, MASTER_PORT=str(port), **place)
    assert f"the rendezvous port {port} is taken" in said
    assert "--main_process_port" in said


def test_a_folder_that_is_not_ours(given: TrainingInput, tmp_path: Path) -> None:
    """A finished model of another base model stays; a folder in use is left alone."""
    out = tmp_path / "arm"
    trained(given, out, f"{STANDARD} --max-steps 1")
    other = tmp_path / "other-model"
    shutil.copytree(given.model, other)
    said = refused(replace(given, model=other), out, STANDARD)
    assert "belongs to another training" in said
    assert str(given.model) in said
    assert (out / "checkpoint.json").exists()
    running = start(given, tmp_path / "busy", f"{STANDARD} --epochs 30")
    while not running.steps:
        time.sleep(0.02)
    said = refused(given, tmp_path / "busy", STANDARD)
    assert "another process is writing here" in said
    running.signal_after(1, signal.SIGTERM)


def test_a_loss_that_is_no_number_names_step_and_records(given: TrainingInput, tmp_path: Path) -> None:
    said = refused(given, tmp_path / "arm", f"{STANDARD} --lr 1e30 --max-grad-norm 0")
    assert "the loss of step" in said or "the gradient norm of step" in said
    assert "records " in said
    assert "(vqa_like)" in said or "(aokvqa)" in said or "(sharegpt4o)" in said
    assert not (tmp_path / "arm" / "checkpoint.json").exists()


@pytest.mark.parametrize("flags", [STANDARD, ODB])
def test_a_record_that_broke_after_the_validation(given: TrainingInput, tmp_path: Path, flags: str) -> None:
    data = tmp_path / "tmdb"
    shutil.copytree(given.data, data)
    for victim in (data / "images" / "iiit5k").iterdir():
        victim.write_bytes(victim.read_bytes()[:40])
    said = refused(replace(given, data=data), tmp_path / "arm", flags)
    assert "iiit5k-" in said
    assert "images/iiit5k/" in said


@pytest.mark.parametrize("flags", [STANDARD, ODB])
def test_a_loader_process_that_was_killed(given: TrainingInput, tmp_path: Path, flags: str) -> None:
    run = start(given, tmp_path / "arm", f"{flags} --epochs 50")
    while len(run.steps) < 3:
        time.sleep(0.02)
    children = Path(f"/proc/{run.processes[0].pid}/task/{run.processes[0].pid}/children")
    for child in map(int, children.read_text().split()):
        os.kill(child, signal.SIGKILL)
    run.wait()
    assert run.statuses == [1]
    assert "a loader process ended" in run.log
    assert "Traceback" not in run.log


@pytest.mark.parametrize(("ranks", "faulty"), [(1, 0), (2, 1)])
def test_a_lost_sample_fails_the_run(given: TrainingInput, tmp_path: Path, ranks: int, faulty: int) -> None:
    """A loader that loses a sample without a word, as odb does on unequal shards."""

    def patch() -> None:
        build = run_module.build_epoch_loader

        def lossy(settings, dataset, collate, *arguments, **more):
            def drop(samples):
                short = samples[1:] if len(samples) == 4 and more["rank"] == faulty else samples
                return collate(short)

            return build(settings, dataset, drop, *arguments, **more)

        run_module.build_epoch_loader = lossy

    run = with_patch(given, tmp_path / "arm", STANDARD, patch, ranks)
    assert set(run.statuses) == {1}
    assert run.log.count("did not train on each sample once") == 1
    assert " lost (rows " in run.log
    assert not (tmp_path / "arm" / "checkpoint.json").exists()


def test_a_rank_that_dies_stops_the_other(given: TrainingInput, tmp_path: Path) -> None:
    run = start(given, tmp_path / "arm", f"{STANDARD} --epochs 50", ranks=2)
    while len(run.steps) < 3:
        time.sleep(0.02)
    os.kill(run.processes[1].pid, signal.SIGKILL)
    began = time.monotonic()
    run.wait()
    assert time.monotonic() - began < 20
    assert run.statuses == [1, -signal.SIGKILL]
    assert "another rank ended during the training" in run.log


def test_a_full_disk_leaves_no_half_model(given: TrainingInput, tmp_path: Path) -> None:
    def patch() -> None:
        save = output.save_model

        def limited(*arguments) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
            save(*arguments)

        output.save_model = limited

    run = with_patch(given, tmp_path / "arm", STANDARD, patch)
    assert run.statuses == [1], run.log[-3000:]
    assert "cannot save the trained model" in run.log
    assert not (tmp_path / "arm" / "checkpoint.json").exists()
    assert not (tmp_path / "arm" / "checkpoint").exists()
    assert not list((tmp_path / "arm").glob(".checkpoint.*"))


def test_gpu_memory_is_told_with_the_shape(given: TrainingInput, tmp_path: Path) -> None:
    def patch() -> None:
        def accumulate(self, batch, factor, last):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

        engines.PlainEngine.accumulate = accumulate

    run = with_patch(given, tmp_path / "arm", STANDARD, patch)
    assert run.statuses == [1]
    assert "the GPU ran out of memory" in run.log
    assert "4 samples" in run.log
    assert "--fixed-batch-size" in run.log


def test_long_samples_are_allowed_and_counted(given: TrainingInput, tmp_path: Path) -> None:
    run = trained(given, tmp_path / "arm", f"{ODB} --token-budget 100 --save-final-model 0")
    assert "is below the longest sample" in run.log
    assert run.summary["over_budget_samples"] > 0
    assert run.summary["samples_audit"]["complete"]


def test_without_a_validation_the_program_validates(given: TrainingInput, tmp_path: Path) -> None:
    flags = given.flags()
    at = flags.index("--validation")
    del flags[at : at + 2]
    flags += ["--loader", "standard", "--fixed-batch-size", "8", "--output-dir", str(tmp_path / "arm")]
    flags += ["--local-data", str(tmp_path / "local" / "tmdb"), "--log-with", "tensorboard"]
    run = fork_ranks(train_accelerate.main, flags, tmp_path / "arm", 1, {}).wait()
    assert run.statuses == [0], run.log[-3000:]
    assert (tmp_path / "arm" / "tmdb_validation" / "validation.json").exists()
    assert (tmp_path / "local" / "tmdb" / ".staged.json").exists()
    assert list((tmp_path / "arm" / "trackers").rglob("events.out.tfevents*"))
    assert run.summary["samples_audit"]["complete"]


@pytest.mark.parametrize("flags", [STANDARD, ODB])
def test_shared_memory_that_is_full(given: TrainingInput, tmp_path: Path, flags: str) -> None:
    """A batch that cannot be shared is an error, not a wait for ever."""

    def patch() -> None:
        from odb_workflow.loaders import transport

        transport.SHARED_FROM_BYTES = 1000
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        build = run_module.build_epoch_loader

        def limited(*arguments, **more):
            loader = build(*arguments, **more)
            collate = loader._loader.collate_fn.collate

            def full(samples):  # in the process that makes batches; shared memory is a file
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
                return collate(samples)

            loader._loader.collate_fn.collate = full
            return loader

        run_module.build_epoch_loader = limited

    run = with_patch(given, tmp_path / "arm", flags, patch)
    assert run.statuses == [1], run.log[-3000:]
    assert run.log.count("error: ") == 1
    assert "shared memory" in run.log or "a loader process ended" in run.log
