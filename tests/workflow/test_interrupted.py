"""What a stopped Snakemake leaves, and checkpoints whose files are gone: nothing finished is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from odb_workflow.runtime.lock import folder_lock

from .conftest import clean_environment, snakemake
from .test_guard import run_sh

pytestmark = pytest.mark.workflow

OTHER = ["--config", "training={lr: 5e-3}"]


def odb(checkout: Path) -> Path:
    return checkout / "outputs/embedded/odb"


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the state that this test waits for did not come"
        time.sleep(0.05)


@contextmanager
def training(checkout: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Snakemake while its training has written its files and not ended yet."""
    (odb(checkout) / "checkpoint.json").unlink()
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2", "train_odb", *arguments],
        cwd=checkout,
        env=clean_environment({"STUB_SLEEP": "2"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until((odb(checkout) / "checkpoint.json").is_file)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.parametrize("arm", ["odb", "untrained/eval_out_accelerate_valloss"])
def test_a_folder_that_another_process_writes_to_is_left_alone(finished_copy: Path, arm: str) -> None:
    folder = finished_copy / "outputs/embedded" / arm
    before = sorted(path.name for path in folder.iterdir())
    changed = ["--config", "training={lr: 5e-3}", "evaluation={max_samples: 5}"]
    with folder_lock(folder, "an orphan"):
        done = snakemake(finished_copy, "all", *changed)
        assert snakemake(finished_copy, "all").returncode == 0, "nothing runs, so nothing is refused"
    assert done.returncode == 1
    assert f"another process is writing there (pid {os.getpid()} on {socket.gethostname()}, an orphan)" in (
        done.stdout
    )
    assert "Training arm" not in done.stdout
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_what_an_ended_training_left_is_kept_for_the_same_command(
    finished_copy: Path, number: signal.Signals
) -> None:
    kept = odb(finished_copy) / ".finished"
    with training(finished_copy, *OTHER) as process:
        kept.mkdir(exist_ok=True)
        process.send_signal(number)
        process.wait(timeout=60)
    # An orphan's shell writes the record when the training has ended.
    until(lambda: '"training.lr": 0.005' in (odb(finished_copy) / "run_record.json").read_text())
    if number == signal.SIGKILL:
        snakemake(finished_copy, "--unlock")
    done = snakemake(finished_copy, "train_odb", *OTHER)
    assert done.returncode == 0, done.stdout
    assert "Training arm odb" in done.stdout  # Snakemake did not see it end
    assert kept.is_dir(), "the training finds there what it had finished, and publishes it"


def test_a_training_wanted_again_finds_nothing_to_publish(finished_copy: Path) -> None:
    kept = odb(finished_copy) / ".finished"
    kept.mkdir()
    assert snakemake(finished_copy, "eval_odb").returncode == 0
    assert kept.is_dir()
    done = snakemake(finished_copy, "train_odb", "--forcerun", "train")
    assert done.returncode == 0, done.stdout
    assert not kept.exists()


def test_weights_that_are_gone_are_told_before_any_job(finished_copy: Path) -> None:
    record = "outputs/embedded/odb/checkpoint.json"
    weights = odb(finished_copy) / "checkpoint/weights"
    says = f"{record} says 7 bytes: put the file back, or delete {record} to train this arm again\n"
    weights.write_text("abc")
    told = f"outputs/embedded/odb/checkpoint/weights has 3 bytes, {says}"
    assert f"note: odb: {told}" in run_sh(finished_copy, "status").stdout
    weights.unlink()
    told = f"outputs/embedded/odb/checkpoint/weights is missing, {says}"
    assert f"note: odb: {told}" in run_sh(finished_copy, "status").stdout
    changed = ["--config", "evaluation={max_samples: 5}"]
    done = run_sh(finished_copy, "eval-odb", *changed)
    assert done.returncode == 1
    assert f"- {told}" in done.stdout
    assert "MMMU-MC of" not in done.stdout
    (finished_copy / record).unlink()
    done = run_sh(finished_copy, "eval-odb", *changed)
    assert done.returncode == 0, done.stdout
    assert "Training arm odb" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["all", "--config", "training={lrr: 1}"], {}, "error: the configuration has 1 fault(s)\n"),
        (["eval-odb", *OTHER], {}, "error: this command would not use what was trained.\n"),
        (["all", *OTHER, "device=cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "error: this run cannot work:\n"),
    ],
    ids=["configuration", "guard", "start"],
)
def test_a_refusal_is_its_message_alone(
    finished: Path, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    done = run_sh(finished, *arguments, env=variables)
    assert done.returncode == 1
    assert f"\n{message}" in f"\n{done.stdout}"
    assert not re.search(r"WorkflowError|Traceback|\.(py|smk)\", line", done.stdout), done.stdout
    assert not list((finished / ".snakemake/locks").glob("*"))


def test_a_dry_run_shows_the_banner_beside_its_plan(finished: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--cores", "2", "all"],
        cwd=finished,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert re.search(r"^run +embedded ", done.stderr, re.MULTILINE)
    assert not re.search(r"^run +embedded ", done.stdout, re.MULTILINE)
    assert "Nothing to be done" in done.stdout
