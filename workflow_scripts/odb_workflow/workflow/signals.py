"""SIGTERM of a SLURM job, passed on to the programs that the job runs.

Where SLURM tracks processes by cgroup, it signals only the first process of a job step. That is Snakemake,
which waits for its rule and tells it nothing, so that a training would be killed without a resume point.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

LAUNCHER = "launch.py"


def pass_on_sigterm(environment: Mapping[str, str] | None = None) -> bool:
    """From now on a SIGTERM to this process also reaches the launchers among its descendants.

    Whatever handles the signal here still does: Snakemake sets its handler later than it reads the Snakefile.

    Returns:
        False outside a SLURM job or the main thread, where nothing is changed.
    """
    inside = "SLURM_JOB_ID" in (os.environ if environment is None else environment)
    if not inside or threading.current_thread() is not threading.main_thread():
        return False
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), daemon=True, name="sigterm").start()
    return True


def _watch(reading: int) -> None:
    while numbers := os.read(reading, 64):
        if signal.SIGTERM in numbers:
            for process in _launchers():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGTERM)


def _launchers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if [Path(word).name for word in process.cmdline()[1:2]] == [LAUNCHER]:
                found.append(process)
    return found
