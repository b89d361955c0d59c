"""A loader for batches that are planned beforehand (standard, length_grouped, token_budget)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from .processes import GuardedForkContext, leave_stopping_to_training
from .transport import ParcelCollator, ParcelDataset, raise_failure


class PlannedBatchLoader:
    """Iterate once over planned batches; ``close`` ends its workers and may be called at any time."""

    def __init__(
        self,
        dataset: Any,
        batches: list[list[int]],
        collate: Callable[[list[dict]], dict[str, Any]],
        *,
        num_workers: int,
        prefetch_factor: int | None,
    ) -> None:
        self.expected_samples = sum(len(batch) for batch in batches)
        self._loader = DataLoader(
            ParcelDataset(dataset),
            batch_sampler=batches,
            collate_fn=ParcelCollator(collate),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            multiprocessing_context=GuardedForkContext() if num_workers else None,
            worker_init_fn=leave_stopping_to_training,
            # its own generator, so that starting a loader does not move the random state of the training
            generator=torch.Generator().manual_seed(0),
        )
        self._iterator: Any = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._iterator = iter(self._loader)
        return self

    def __next__(self) -> dict[str, Any]:
        batch = dict(next(self._iterator))
        raise_failure(batch)
        return batch

    def close(self) -> None:
        """End the workers; nothing is left running afterwards."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
