"""One job per GPU: locks on devices that also hold between two Snakemake processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..runtime.errors import UserError
from .gpus import visible_devices

LOCK_FOLDER = "odb-gpu-locks"
POLL_SECONDS = 2.0


@contextlib.contextmanager
def lock_devices(count: int, *, folder: Path | None = None) -> Iterator[list[str]]:
    """Hold ``count`` devices that no other job of this machine holds; waits until so many are free.

    Inside a SLURM job the scheduler has placed the job already, and its devices are taken as they are.

    Raises:
        UserError: the machine has fewer devices than asked for.
    """
    if count == 0:
        yield []
        return
    devices = visible_devices()
    if len(devices) < count:
        seen = (
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}"
            if "CUDA_VISIBLE_DEVICES" in os.environ
            else "nvidia-smi"
        )
        raise UserError(
            f"{count} GPU(s) asked for, {len(devices)} found ({seen})",
            fix="run on a machine with GPUs, lower training.num_processes, or set `device: cpu`",
        )
    if "SLURM_JOB_ID" in os.environ and "CUDA_VISIBLE_DEVICES" in os.environ:
        yield devices[:count]
        return
    folder = folder or Path(tempfile.gettempdir()) / LOCK_FOLDER
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):
        folder.chmod(0o1777)  # shared by all users of the machine
    held: dict[str, int] = {}
    told = False
    try:
        while True:
            for device in devices:
                if len(held) < count and device not in held:
                    descriptor = _try_lock(folder / device.replace("/", "_"))
                    if descriptor is not None:
                        held[device] = descriptor
            if len(held) == count:
                break
            # Holding some while waiting for more could deadlock two jobs of two GPUs each.
            _release(held)
            if not told:
                print(f"waiting for {count} free GPU(s) of {', '.join(devices)}", file=sys.stderr, flush=True)
                told = True
            time.sleep(POLL_SECONDS)
        yield [device for device in devices if device in held]
    finally:
        _release(held)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    # The job's processes inherit the lock: while one of them lives, the device is taken.
    os.set_inheritable(descriptor, True)
    return descriptor


def _release(held: dict[str, int]) -> None:
    for descriptor in held.values():
        os.close(descriptor)
    held.clear()
