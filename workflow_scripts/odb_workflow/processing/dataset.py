"""A map-style dataset over accepted rows.

It has no ``__getitems__``: ODB logs the ids it emits only for datasets without one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ..tmdb.store import RecordStore
from .sample import SampleProcessor


class SampleDataset(Dataset):
    """``dataset[i]`` is the processed sample of row ``rows[i]``.

    Safe in forked workers: the store reads by ``pread`` and no state changes after construction.

    Args:
        store: The records.
        rows: int64 ``[n]``, rows of ``records.jsonl`` in the order wanted.
        sample_processor: Turns a record into a sample.
    """

    def __init__(self, store: RecordStore, rows: np.ndarray, sample_processor: SampleProcessor) -> None:
        self.store = store
        self.rows = np.asarray(rows, dtype=np.int64)
        self.sample_processor = sample_processor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = int(self.rows[index])
        return self.sample_processor(self.store[row], row)
