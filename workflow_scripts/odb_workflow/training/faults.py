"""Failures of the machine in one message: memory, disk, shared memory, descriptors, killed processes."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import torch

from ..loaders.transport import SHARED_MEMORY_FIX
from ..runtime.errors import UserError
from ..tmdb.records import BadRecord
from .agreement import AllRanksError
from .steps import MicroBatch

EXIT_ANOTHER_RANK = 1
MEMORY_FIX = (
    "lower --token-budget (or --fixed-batch-size) or --max-length, or use --gradient-checkpointing on; "
    "the same command continues from the last resume point"
)


_common_phase = [True]


def setup_is_done() -> None:
    """From now on a UserError is a rank's own; before, all ranks of a machine see the same."""
    _common_phase[0] = False


@contextlib.contextmanager
def readable_faults() -> Iterator[None]:
    """Turn known failures of the machine into UserErrors; ranks other than 0 do not repeat a common one."""
    try:
        yield
    except AllRanksError:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(EXIT_ANOTHER_RANK) from None
        raise
    except UserError:
        if _common_phase[0] and os.environ.get("LOCAL_RANK", "0") != "0":
            raise SystemExit(EXIT_ANOTHER_RANK) from None
        raise
    except (torch.OutOfMemoryError, OSError, RuntimeError, MemoryError) as error:
        told = explain(error)
        if told is None:
            raise
        raise told from error


@contextlib.contextmanager
def shape_told(micro: MicroBatch) -> Iterator[None]:
    """Add the shape of the batch to an error about GPU memory.

    Raises:
        UserError: the GPU has too little memory for this batch.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows, width = micro.tensors["input_ids"].shape
        patches = len(micro.tensors["pixel_values"]) if "pixel_values" in micro.tensors else 0
        raise UserError(
            f"the GPU ran out of memory: {str(error).splitlines()[0]}",
            where=f"a batch of {len(micro.rows)} samples, {rows} x {width} tokens, {patches} image patches",
            fix=MEMORY_FIX,
        ) from error


def explain(error: BaseException) -> UserError | None:
    """The UserError for a failure that has a known cause, or None."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(
            f"the GPU ran out of memory: {text.splitlines()[0]}",
            fix=MEMORY_FIX,
        )
    if isinstance(error, BadRecord):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return UserError(
            f"no space left: {text}",
            where=error.filename or "/dev/shm or the output folder",
            fix="free space and run the same command again",
        )
    if (isinstance(error, OSError) and error.errno == errno.EMFILE) or "Too many open files" in text:
        return UserError(
            "too many open files", fix="raise the limit (ulimit -n 65536) or lower --num-workers"
        )
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return UserError(f"cannot write: {text}", where=error.filename, fix="choose a writable --output-dir")
    if "Bus error" in text or "shared memory" in text:
        return UserError(
            f"shared memory is full: {text.splitlines()[0]}",
            where="/dev/shm",
            fix=SHARED_MEMORY_FIX,
        )
    if "DataLoader worker" in text or "collate process" in text:
        return UserError(
            f"a loader process ended: {text.splitlines()[0]}",
            fix="if it was killed, memory was short: lower --num-workers, --buffer-size or "
            "--prefetch-factor; the same command continues from the last resume point",
        )
    if any(
        words in text for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    ):
        return UserError("another rank ended during the training; its own message says why")
    return None
