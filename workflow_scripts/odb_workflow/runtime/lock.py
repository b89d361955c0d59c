"""One writer per output folder.

SIGKILL of Snakemake leaves its job alive; a second run would then train into the same folder. The lock is an
``flock`` on a file in the folder: the kernel drops it when the holder dies, so it never goes stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from .errors import UserError

LOCK_NAME = ".lock"


@contextlib.contextmanager
def folder_lock(folder: str | Path, purpose: str) -> Iterator[None]:
    """Hold the lock of ``folder`` for the block.

    Raises:
        UserError: another process holds it; names the folder and the process id.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _named(descriptor)
            raise UserError(
                f"cannot start {purpose}: another process is writing here ({holder})",
                where=str(folder),
                fix="wait for it, or stop that process, then run the same command again",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}, {purpose}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def lock_holder(folder: str | Path) -> str | None:
    """Who holds the lock of ``folder``: process id, host and purpose; None where it is free."""
    try:
        descriptor = os.open(Path(folder) / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named(descriptor)
    finally:
        os.close(descriptor)
    return None


def _named(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "unknown"
