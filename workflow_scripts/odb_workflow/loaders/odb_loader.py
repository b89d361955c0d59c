"""Online Dynamic Batching, the real package, with what it leaves to its caller.

odb does not shard, so that the caller gives it the positions of one rank; its iterator must never pass
through ``accelerator.prepare`` (which would replace it by one of batch size 1); and it leaves the end of its
processes to garbage collection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import odb
import torch
from odb.constants import LOCAL_TOKENS_KEY, TOTAL_BATCH_SIZE_KEY, TOTAL_TOKENS_KEY
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from ..runtime.errors import UserError
from .factory import LoaderSettings
from .processes import GuardedForkContext, leave_stopping_to_training
from .transport import ParcelCollator, ParcelDataset, raise_failure

ODB_INFO_KEY = "odb_info"
"""Where a batch carries its ``odb.ODBStepInfo`` (samples over all ranks, loss scale)."""

FIRST_ITERATOR_SEED = 67108
"""odb's own default; the seeds of later epochs count on from the one chosen here."""

JOIN_SECONDS = 30.0
STOP_SECONDS = 5.0


class OdbLoader:
    """Iterate once over the positions of one rank, in batches that odb forms.

    Batches are dictionaries of the collate function plus ``odb_info``. ``close`` ends workers and collate
    process and may be called at any time.

    Args:
        positions: this rank's positions; all ranks must have equally many.
        iterator_seed: seed of odb's group shuffle and the name of its process group: the same on all ranks,
            different for each loader of a run (a reused name costs about 6 s).
    """

    def __init__(
        self,
        dataset: Any,
        positions: list[int],
        collate: Callable[[list[dict]], dict[str, Any]],
        settings: LoaderSettings,
        *,
        iterator_seed: int,
    ) -> None:
        self.expected_samples = len(positions)
        self._settings = settings
        # odb sleeps up to 2 s before each epoch to spread the start of many nodes
        os.environ.setdefault("ODB_ITERATOR_STARTUP_JITTER_SEC", "0")
        self._loader = DataLoader(
            ParcelDataset(dataset),
            batch_size=1,
            sampler=positions,
            collate_fn=ParcelCollator(collate),
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            multiprocessing_context=GuardedForkContext(),
            worker_init_fn=leave_stopping_to_training,
            generator=torch.Generator().manual_seed(0),
        )
        odb.apply(
            self._loader,
            token_budget=settings.token_budget,
            buffer_size=settings.buffer_size,
            loss_scaling=settings.odb_loss_scaling,
            join=settings.join,
            no_warmup=settings.no_warmup,
            max_patches=settings.max_patches,
            group_order_flip=settings.group_order_flip,
        )
        self._loader._iter_random_seed = FIRST_ITERATOR_SEED + iterator_seed
        self._iterator: Any = None
        self._exhausted = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._iterator = iter(self._loader)
        return self

    def __next__(self) -> dict[str, Any]:
        try:
            batch = dict(next(self._iterator))
        except StopIteration:
            self._exhausted = True
            raise
        raise_failure(batch)
        self._check_metadata(batch)
        batch[ODB_INFO_KEY] = odb.pop_step_info(batch, loss_scaling=self._settings.odb_loss_scaling)
        return batch

    def _check_metadata(self, batch: dict[str, Any]) -> None:
        wanted = [TOTAL_BATCH_SIZE_KEY]
        if self._settings.odb_loss_scaling != "none":
            wanted += [TOTAL_TOKENS_KEY, LOCAL_TOKENS_KEY]
        missing = [key for key in wanted if key not in batch]
        if missing:
            raise UserError(
                f"odb's metadata did not reach the training loop: {', '.join(missing)}",
                where="the collate function",
                fix="copy these keys from a sample into the batch; without them the loss scale would be 1.0",
            )

    def close(self) -> None:
        """End workers and collate process; nothing is left running afterwards.

        After a whole epoch the collate process is waited for, because in join mode it still serves other
        ranks. Before the end of an epoch it is ended at once: it may wait for a rank that will not come, or
        for a reader.
        """
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return
        collate_process = iterator._collate_process
        if self._exhausted:
            collate_process.join(JOIN_SECONDS)
        if self._exhausted and not collate_process.is_alive():
            iterator._shutdown_workers()
        else:
            self._stop_now(iterator)

    @staticmethod
    def _stop_now(iterator: Any) -> None:
        iterator._shutdown = True  # its own clean-up would wait for queues that nobody reads
        # torch's SIGCHLD handler would take the end of a process that we stop for a crash
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        iterator._workers_done_event.set()
        processes = [iterator._collate_process, *iterator._workers]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
        for queue in (iterator._worker_result_queue, iterator._collate_queue, *iterator._index_queues):
            queue.cancel_join_thread()
            queue.close()
