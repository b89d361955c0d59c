"""Loader processes that never outlive the training process.

Neither the collate process of ODB nor a worker that waits on a queue notices at once that its parent was
killed; the kernel can be told to end them with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing.context
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``signal_number`` to this process when its parent ends (Linux; else nothing)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


class GuardedProcess(multiprocessing.context.ForkProcess):
    """A forked process that ends with its parent and leaves signals to the job to it."""

    def run(self) -> None:
        parent = os.getppid()
        die_with_parent()
        if os.getppid() != parent:  # the parent died between fork and prctl
            sys.exit(1)
        # A group of its own: a stop sent to the whole job is for the training process, which still needs
        # its loader until the resume point is written; torch would take the loader's end for a crash.
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        super().run()


class GuardedForkContext(multiprocessing.context.ForkContext):
    """The fork context with ``GuardedProcess``; for ``DataLoader(multiprocessing_context=...)``."""

    Process = GuardedProcess
