"""The training as a process: signals as a wish to stop, its launcher, its limits."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from types import FrameType

from ..loaders.processes import die_with_parent


class StopRequest:
    """Remembers the first SIGTERM or SIGINT; a second SIGINT interrupts at once.

    Use as a context manager; the handlers before are put back at its end.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number

    @property
    def wanted(self) -> bool:
        return self.signal_number is not None


def end_with_launcher() -> None:
    """Be told to stop when the launcher dies.

    ``accelerate launch`` with one process does not pass SIGTERM on, so that stopping it would leave the
    training running alone. Only a launcher counts as such a parent: a training started from a shell outlives
    the shell.
    """
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return
    if any(name in command for name in (b"accelerate", b"torchrun", b"torch.distributed")):
        die_with_parent(signal.SIGTERM)


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have; loaders use many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
