"""Samples and batches on their way between loader processes.

torch sends every tensor through a file descriptor or a file in /dev/shm of its own: about 0.7 ms a tensor,
and a buffer of 1,024 samples with seven tensors each holds 7,000 descriptors and all its pixels in /dev/shm,
where the usual limits are 1,024 and, in a container, 64 MB. Samples are therefore sent as bytes inside the
message (ten times faster for samples of 60 tokens); only the large tensors of a batch, its pixels, go
through shared memory.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..runtime.errors import UserError

SHARED_FROM_BYTES = 1 << 20
SHARED_MEMORY_FIX = (
    "make /dev/shm larger (docker run --shm-size), or lower --buffer-size, --prefetch-factor or --num-workers"
)


class Parcel(dict):
    """A dictionary that is sent as bytes and arrives as a plain dictionary with equal tensors."""

    def __reduce__(self) -> tuple[Callable[..., dict], tuple]:
        return _unpack, ([(key, _wrap(value)) for key, value in self.items()],)

    def share_large_tensors(self) -> Parcel:
        """Send tensors above ``SHARED_FROM_BYTES`` through shared memory; moves them there now.

        Left to the queue's own thread, a full /dev/shm would be printed there, the batch dropped, and the
        training would wait for it for ever; here it is an error of the worker, which reaches the training.
        """
        for value in self.values():
            if isinstance(value, torch.Tensor) and _bytes(value) > SHARED_FROM_BYTES:
                try:
                    value.share_memory_()
                except (OSError, RuntimeError) as error:
                    raise UserError(
                        f"{_bytes(value)} bytes cannot be put into shared memory: {error}",
                        where="/dev/shm",
                        fix=SHARED_MEMORY_FIX,
                    ) from None
        return self


class _Bits:
    """A tensor as a numpy array plus its dtype (numpy has no bfloat16)."""

    __slots__ = ("array", "dtype")

    def __init__(self, array: np.ndarray, dtype: torch.dtype) -> None:
        self.array, self.dtype = array, dtype

    def __reduce__(self) -> tuple[type, tuple]:
        return _Bits, (self.array, self.dtype)


def _wrap(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_shared():
        return value
    if value.dtype == torch.bfloat16:
        return _Bits(value.contiguous().view(torch.int16).numpy(), value.dtype)
    return _Bits(value.contiguous().numpy(), value.dtype)


def _unwrap(value: Any) -> Any:
    if not isinstance(value, _Bits):
        return value
    tensor = torch.from_numpy(value.array)
    return tensor.view(torch.bfloat16) if value.dtype == torch.bfloat16 else tensor


def _unpack(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: _unwrap(value) for key, value in items}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


FAILURE_KEY = "loader_failure"


def _failed(error: Exception) -> Parcel:
    """A parcel that carries an error to the training.

    ``input_ids`` lets odb count it as a sample: an error that odb passes on by itself is never read where the
    buffer waits for one more sample, and the training would wait for ever.
    """
    if not isinstance(error, UserError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of libraries often cannot be pickled
        error = RuntimeError("".join(traceback.format_exception(error)))
    return Parcel({"input_ids": torch.zeros(1, dtype=torch.int64), FAILURE_KEY: error})


def raise_failure(batch: dict[str, Any]) -> None:
    """Raise the error that a loader process sent in place of a batch."""
    if FAILURE_KEY in batch:
        raise batch[FAILURE_KEY]


class ParcelDataset:
    """A map-style dataset whose samples travel as parcels; an error travels as a parcel too.

    It has no ``__getitems__``, so that every sample is fetched by ``__getitem__``. ``pop`` returns the
    dataset itself: from torch 2.14 the private worker loop receives a one-element list and calls ``.pop()``
    on it, while odb 0.1.2 still hands over the dataset. Older versions of torch never call it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def pop(self) -> ParcelDataset:
        return self

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Parcel:
        try:
            return Parcel(self.dataset[position])
        except Exception as error:
            return _failed(error)


class ParcelCollator:
    """A collate function whose batches travel as parcels, and its errors and those of samples too."""

    def __init__(self, collate: Callable[[Sequence[dict]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[dict]) -> Parcel:
        for sample in samples:
            if FAILURE_KEY in sample:
                return Parcel(sample)
        try:
            return Parcel(self.collate(samples)).share_large_tensors()
        except Exception as error:
            return _failed(error)
