"""Samples and batches on their way between loader processes.

torch sends every tensor through a file descriptor or a file in /dev/shm of its own: about 0.7 ms a tensor,
and a buffer of 1,024 samples with seven tensors each holds 7,000 descriptors, where the usual limit is 1,024.
Small tensors are therefore sent as bytes inside the message (measured ten times faster for samples of 60
tokens); only large ones, such as the pixels of a big batch, go through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

INLINE_BYTES = 1 << 20


class Parcel(dict):
    """A dictionary that arrives in another process as a plain dictionary with equal tensors."""

    def __reduce__(self) -> tuple[Callable[..., dict], tuple]:
        return _unpack, ([(key, _wrap(value)) for key, value in self.items()],)


class _Bits:
    """A small tensor as a numpy array plus its dtype (numpy has no bfloat16)."""

    __slots__ = ("array", "dtype")

    def __init__(self, array: np.ndarray, dtype: torch.dtype) -> None:
        self.array, self.dtype = array, dtype

    def __reduce__(self) -> tuple[type, tuple]:
        return _Bits, (self.array, self.dtype)


def _wrap(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() * value.element_size() > INLINE_BYTES:
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


class ParcelDataset:
    """A map-style dataset whose samples travel as parcels.

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
        return Parcel(self.dataset[position])


class ParcelCollator:
    """A collate function whose batches travel as parcels."""

    def __init__(self, collate: Callable[[Sequence[dict]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[dict]) -> Parcel:
        return Parcel(self.collate(samples))
