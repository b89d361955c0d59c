"""Programs started on several devices through ``launch.py``, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow_scripts"
MARK = "ODB_BENCHMARK_RUN"
SECONDS_TO_LEAVE = 3.0
SECONDS_TO_STOP = 15.0


@dataclass(frozen=True)
class Ended:
    """A program that ended well.

    Attributes:
        seconds: From its start to the launcher's end.
        orphans: Processes of the run that were still there ``SECONDS_TO_LEAVE`` after the launcher's end;
        they are killed.
    """

    seconds: float
    orphans: int


def launch(
    program: Path,
    arguments: Sequence[str],
    *,
    processes: int,
    cuda: bool,
    threads: int,
    log: Path,
    timeout: float,
    accelerate: bool = False,
) -> Ended:
    """Run ``program`` on ``processes`` ranks, one GPU each where ``cuda``.

    NCCL's and NVLink's variables are handed on as they are.

    Raises:
        RuntimeError: it failed or took longer than ``timeout`` seconds; carries the end of its log.
    """
    command = [
        sys.executable,
        str(SCRIPTS / "launch.py"),
        *("--processes", str(processes), "--gpus", str(processes if cuda else 0)),
        *("--threads", str(threads)),
        *(("--accelerate",) if accelerate else ()),
        *("--", str(program), *arguments),
    ]
    mark = uuid.uuid4().hex
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", **{MARK: mark})
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        status: int | str
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = f"no end within {timeout:.0f} s"
            _stop(process)
        except BaseException:  # this script is told to end
            _stop(process)
            _end_orphans(mark)
            raise
    seconds = time.monotonic() - began
    orphans = _end_orphans(mark)
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{program.name} ended with {status}, {orphans} processes left:\n{tail}")
    return Ended(seconds, orphans)


def marked_processes(mark: str) -> list[int]:
    """Ids of the processes whose environment holds the mark of a run."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):  # it ended meanwhile, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _stop(process: subprocess.Popen) -> None:
    process.terminate()  # the launcher tells its ranks
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_STOP)


def _end_orphans(mark: str) -> int:
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)
