"""Loader processes that never outlive the training process.

Neither the collate process of ODB nor a worker that waits on a queue notices at once that its parent was
killed; the kernel can be told to end them with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing.context
import multiprocessing.popen_fork
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``signal_number`` to this process when its parent ends (Linux; else nothing)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


def leave_stopping_to_training(_worker: int = 0) -> None:
    """Ignore SIGINT and SIGTERM; also a ``worker_init_fn``, since torch's worker sets its own handler first.

    A cluster sends SIGTERM to every process of a job, and a terminal Ctrl-C to the group. The training still
    needs its loader until the resume point is written; torch would take the loader's end for a crash.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _KillingPopen(multiprocessing.popen_fork.Popen):
    def terminate(self) -> None:
        self.kill()  # SIGTERM is ignored, and multiprocessing waits at exit for what it has terminated


class GuardedProcess(multiprocessing.context.ForkProcess):
    """A forked process that ends with its parent and leaves signals to the job to it."""

    @staticmethod
    def _Popen(process: GuardedProcess) -> _KillingPopen:
        return _KillingPopen(process)

    def run(self) -> None:
        parent = os.getppid()
        die_with_parent()
        if os.getppid() != parent:  # the parent died between fork and prctl
            sys.exit(1)
        os.setpgid(0, 0)  # a stop sent to the training's group is not for its loader
        leave_stopping_to_training()
        super().run()


class GuardedForkContext(multiprocessing.context.ForkContext):
    """The fork context with ``GuardedProcess``; for ``DataLoader(multiprocessing_context=...)``."""

    Process = GuardedProcess
