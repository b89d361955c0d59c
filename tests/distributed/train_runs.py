"""Runs of the training program in forked children of the test process, on any number of gloo ranks.

Forking saves importing torch and transformers for each rank. Where the launcher itself matters, ``launched``
starts a real one.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import odb  # noqa: F401
import train_accelerate
from accelerate.state import AcceleratorState, GradientState
from odb_workflow.model.load import load_processor
from odb_workflow.runtime.errors import run_main
from odb_workflow.tmdb.validate import validate_tmdb
from odb_workflow.training import program  # noqa: F401

PROGRAM = Path(train_accelerate.__file__)
SECONDS = 150
SIGTERM, SIGKILL, SIGINT = signal.SIGTERM, signal.SIGKILL, signal.SIGINT
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU")


@dataclass(frozen=True)
class TrainingInput:
    """A tiny model, a tiny TMDB and its validation."""

    model: Path
    data: Path
    validation: Path

    def flags(self) -> list[str]:
        """The flags that every run here shares."""
        text = "--precision fp32 --lr 1e-3 --val-size 0.1 --max-length 4096 --num-workers 1 --seed 5 --cpu"
        places = ["--model", self.model, "--data", self.data, "--validation", self.validation]
        return [*map(str, places), *text.split()]


def validated(model: Path, data: Path, folder: Path) -> TrainingInput:
    """What the training runs are given: model, data and its validation in ``folder``."""
    processor = load_processor(model, 589824)
    validate_tmdb(data, processor, max_length=4096, output_dir=folder, processes=1, progress=False)
    return TrainingInput(model, data, folder)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(
    main: Callable[[], int],
    argv: list[str],
    rank: int,
    world_size: int,
    port: int,
    log: Path,
    variables: dict[str, str],
) -> None:
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    # what other tests of this process left behind
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    os.environ |= variables
    sys.argv = [str(PROGRAM), *argv]
    run_main(main)


@dataclass
class Run:
    """One training, started; ``out`` is its output folder."""

    out: Path
    processes: list[multiprocessing.Process]
    logs: list[Path]
    statuses: list[int] = field(default_factory=list)

    @property
    def log(self) -> str:
        """What all ranks wrote to stderr."""
        return "".join(log.read_text() for log in self.logs)

    @property
    def summary(self) -> dict[str, Any]:
        (path,) = self.out.glob("train_summary_*.json")
        return json.loads(path.read_text())

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The step log, whole lines only."""
        path = self.out / "step_log.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def wait(self) -> Run:
        """Wait for all ranks; a rank that hangs is killed and fails the test."""
        deadline = time.monotonic() + SECONDS
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        hung = [process for process in self.processes if process.is_alive()]
        for process in hung:
            os.kill(process.pid, signal.SIGUSR1)  # writes its stacks to the log
            time.sleep(1)
            process.kill()
            process.join()
        assert not hung, f"{len(hung)} ranks hang:\n{self.log[-3000:]}"
        self.statuses = [int(process.exitcode) for process in self.processes]
        return self

    def signal_after(self, steps: int, number: int) -> Run:
        """Send a signal to every rank once so many steps are logged, and wait."""
        while len(self.steps) < steps:
            assert all(process.is_alive() for process in self.processes), self.log[-3000:]
            time.sleep(0.01)
        for process in self.processes:
            os.kill(process.pid, number)
        return self.wait()


def fork_ranks(
    main: Callable[[], int], argv: list[str], out: Path, ranks: int, variables: dict[str, str]
) -> Run:
    """Run ``main`` with this command line on so many ranks."""
    out.parent.mkdir(parents=True, exist_ok=True)
    context, port = multiprocessing.get_context("fork"), free_port()
    logs = [out.parent / f"{out.name}.{time.monotonic_ns()}.{rank}.log" for rank in range(ranks)]
    processes = [
        context.Process(target=_child, args=(main, argv, rank, ranks, port, logs[rank], variables))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return Run(out, processes, logs)


def start(given: TrainingInput, out: Path, flags: str, ranks: int = 1, **variables: str) -> Run:
    """Start a training on so many ranks."""
    argv = [*given.flags(), "--output-dir", str(out), *flags.split()]
    return fork_ranks(train_accelerate.main, argv, out, ranks, variables)


def trained(given: TrainingInput, out: Path, flags: str, ranks: int = 1, **variables: str) -> Run:
    """A training that must end without error."""
    run = start(given, out, flags, ranks, **variables).wait()
    assert set(run.statuses) == {0}, run.log[-4000:]
    return run


def refused(given: TrainingInput, out: Path, flags: str, ranks: int = 1, **variables: str) -> str:
    """A training that must end with one message and no traceback; returns what was printed."""
    run = start(given, out, flags, ranks, **variables).wait()
    assert set(run.statuses) == {1}, (run.statuses, run.log[-4000:])
    assert "Traceback" not in run.log
    assert run.log.count("error: ") == 1, run.log
    return run.log


def launched(given: TrainingInput, out: Path, launcher: list[str], flags: str) -> subprocess.Popen:
    """Start the program by a real launcher, such as ``["-m", "torch.distributed.run", ...]``."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    line = [sys.executable, *launcher, str(PROGRAM), *given.flags(), "--output-dir", str(out), *flags.split()]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parent)}
    return subprocess.Popen(line, env=kept | variables, stderr=subprocess.PIPE, text=True)


def processes_of(out: Path) -> list[int]:
    """Processes whose command line names this output folder, loader processes included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(out).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def soon(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether a condition comes true in so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
