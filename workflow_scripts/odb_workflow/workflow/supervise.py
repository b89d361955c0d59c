"""Run a program so that signals reach all of its processes and none outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 120.0
LEFTOVER_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


def _before_program() -> None:
    # The rule's shell ignores SIGTERM, so that it and the log outlive the program where a cluster signals
    # every process of a job; the program itself must be told.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Linux: if this supervisor is killed outright, the program is asked to end.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def supervise(
    command: list[str], environment: dict[str, str], *, grace_seconds: float = GRACE_SECONDS
) -> int:
    """Run ``command`` in a process group of its own; returns its exit status.

    The first SIGTERM or SIGINT is passed on as SIGTERM to the whole group, which then has ``grace_seconds``
    to write a resume point; after that it is killed. Ends with 128 + signal where a signal ended the program.
    """
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        process_group=0,
        close_fds=False,  # the locks on devices are inherited
        preexec_fn=_before_program,
    )
    deadline: list[float] = []

    def forward(number: int, _frame: object) -> None:
        if not deadline:
            deadline.append(time.monotonic() + grace_seconds)
            # SIGTERM also for Ctrl-C: launchers between us and the program end without a traceback.
            _signal_group(child.pid, signal.SIGTERM)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            try:
                status = child.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if deadline and time.monotonic() > deadline[0]:
                    print("the program did not end in time and is killed", file=sys.stderr, flush=True)
                    _signal_group(child.pid, signal.SIGKILL)
        _end_leftovers(child.pid, deadline[0] if deadline else None)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _end_leftovers(group: int, deadline: float | None) -> None:
    """End processes of the group that outlived the program.

    Args:
        deadline: Set where the group has been told to stop: a launcher may end before the training that it
        started,
            which is then still writing its resume point.
    """
    if deadline is None:
        if not _signal_group(group, signal.SIGTERM):
            return
        deadline = time.monotonic() + LEFTOVER_SECONDS
    while time.monotonic() < deadline:
        if not _signal_group(group, 0):
            return
        time.sleep(0.1)
    _signal_group(group, signal.SIGKILL)
