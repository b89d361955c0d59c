"""Score planned batches on all ranks: load ahead, run the model, keep each finished batch, gather at the
end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from odb_workflow.loaders.processes import GuardedForkContext, leave_stopping_to_training
from odb_workflow.loaders.transport import Parcel
from odb_workflow.runtime.errors import UserError

from .partial import PartialResults
from .plan import batches_of_rank, remaining_batches
from .ranks import EvaluationRanks

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
#: Runs the model on one collated batch that is on the device: one list of numbers per sample, in batch order.
Scorer = Callable[[Batch], list[list[float]]]


class ItemError(Exception):
    """A dataset item that cannot be scored; raised by datasets of this package, names the sample."""


class Items(Protocol):
    """What is scored: samples before batching, each with a key that names it in partial results and
    messages.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def key(self, index: int) -> str:
        """Identity of the sample, equal in every run over the same data."""


@dataclass
class Fault:
    """An error of a worker, as a value: it crosses the process border without a traceback wrapped around
    it.
    """

    message: str


@dataclass
class WorkerSettings:
    """Workers that prepare batches ahead. ``num_workers`` 0 loads in the main process."""

    num_workers: int
    prefetch_factor: int = 2


@dataclass
class RunStatistics:
    """What a run did, for its record."""

    samples: int = 0
    reused: int = 0
    batches: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    split_after_out_of_memory: int = 0
    peak_memory_bytes: int | None = None
    values: dict[str, list[float]] = field(default_factory=dict, repr=False)


class _Guarded(Dataset):
    """The items, with their known errors turned into values."""

    def __init__(self, items: Items, known_errors: tuple[type[Exception], ...]) -> None:
        self.items, self.known_errors = items, known_errors

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self.items[index]
        except self.known_errors as error:
            return index, Fault(f"{self.items.key(index)}: {error}")


class _Collate:
    """Collate samples into (indices, batch), or pass the first fault on."""

    def __init__(self, collator: Callable[[Sequence[dict[str, Any]]], Batch]) -> None:
        self.collator = collator

    def __call__(self, pairs: Sequence[tuple[int, Any]]) -> tuple[list[int], Any]:
        indices = [index for index, _ in pairs]
        fault = next((sample for _, sample in pairs if isinstance(sample, Fault)), None)
        if fault is not None:
            return indices, fault
        return indices, Parcel(self.collator([sample for _, sample in pairs]))


def default_workers(device: torch.device, local_world_size: int) -> int:
    """Workers per rank: on a GPU up to 12 that share the host's cores; on a CPU none, where they would only
    compete with the model for the same cores.
    """
    if device.type != "cuda":
        return 0
    return max(1, min(12, len(os.sched_getaffinity(0)) // max(local_world_size, 1) - 1))


def score_items(
    items: Items,
    batches: Sequence[Sequence[int]],
    collator: Callable[[Sequence[dict[str, Any]]], Batch],
    scorer: Scorer,
    *,
    ranks: EvaluationRanks,
    partial: PartialResults,
    loader: WorkerSettings,
    known_errors: tuple[type[Exception], ...] = (),
    progress: str = "",
) -> RunStatistics:
    """Score every item of ``batches`` exactly once, whatever the number of ranks, reusing what ``partial``
    holds.

    Args:
        items: The samples.
        batches: The plan over all samples; must not depend on the number of ranks.
        collator: Samples to a batch.
        scorer: Batch on the device to one list of numbers per sample.
        known_errors: Errors of ``items[index]`` that name a fault of the data.
        progress: Label of the progress bar.

    Returns:
        This rank's statistics; ``values`` holds the numbers of all items, by key, on every rank.

    Raises:
        UserError: a sample cannot be loaded or its numbers are not finite; names the sample.
    """
    launch, done_values = ranks.main_only(lambda: (partial.prepare(), partial.load()))
    planned = [index for batch in batches for index in batch]
    done = {index for index in planned if items.key(index) in done_values}
    mine = batches_of_rank(remaining_batches(batches, done), ranks.rank, ranks.world_size)
    if done and ranks.main:
        logger.info("%d of %d samples were scored by an earlier run", len(done), len(planned))
    statistics = RunStatistics(reused=len(done))
    guarded, collate = _Guarded(items, known_errors), _Collate(collator)
    values: dict[str, list[float]] = {}
    partial.open(launch, ranks.rank)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    start = time.perf_counter()
    bar = tqdm(
        total=sum(map(len, mine)),
        desc=progress,
        unit="sample",
        disable=not ranks.main,
        mininterval=1,
        leave=False,
    )
    try:
        with contextlib.closing(_loaded(guarded, collate, mine, loader, ranks.device)) as loaded:
            waiting = time.perf_counter()
            for indices, batch in loaded:
                statistics.wait_seconds += time.perf_counter() - waiting
                scores = _score(indices, batch, guarded, collate, scorer, ranks.device, statistics)
                keys = [items.key(index) for index in indices]
                _check_finite(keys, scores)
                partial.append(keys, scores)
                values.update(zip(keys, scores, strict=True))
                bar.update(len(indices))
                waiting = time.perf_counter()
    finally:
        bar.close()
        partial.close()
    statistics.seconds = time.perf_counter() - start
    statistics.samples = len(values)
    if ranks.device.type == "cuda":
        statistics.peak_memory_bytes = torch.cuda.max_memory_allocated(ranks.device)
    statistics.values = {key: done_values[key] for key in (items.key(index) for index in done)}
    for part in ranks.gather(values):
        statistics.values.update(part)
    missing = [items.key(index) for index in planned if items.key(index) not in statistics.values]
    if missing:
        raise RuntimeError(f"{len(missing)} samples were not scored, the first is {missing[0]}")
    return statistics


def _loaded(
    guarded: _Guarded,
    collate: _Collate,
    batches: list[list[int]],
    settings: WorkerSettings,
    device: torch.device,
) -> Iterator[tuple[list[int], Any]]:
    workers = min(settings.num_workers, len(batches))
    loader = DataLoader(
        guarded,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=settings.prefetch_factor if workers else None,
        multiprocessing_context=GuardedForkContext() if workers else None,
        worker_init_fn=leave_stopping_to_training,
        pin_memory=device.type == "cuda",
    )
    iterator = iter(loader)
    try:
        yield from iterator
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a loader process ended: {str(error).splitlines()[0]}",
            where="memory or /dev/shm",
            fix="lower --num-workers, --prefetch-factor or --token-budget; the same command goes on",
        ) from error
    finally:
        if workers:
            iterator._shutdown_workers()


def _score(
    indices: list[int],
    batch: Any,
    guarded: _Guarded,
    collate: _Collate,
    scorer: Scorer,
    device: torch.device,
    statistics: RunStatistics,
) -> list[list[float]]:
    """Score one batch; one that does not fit into GPU memory is halved, down to single samples."""
    if isinstance(batch, Fault):
        raise UserError(
            f"a sample cannot be scored: {batch.message}",
            fix="mend or remove it, then validate the data again",
        )
    try:
        scores = scorer(to_device(batch, device))
    except torch.OutOfMemoryError:
        if len(indices) == 1:
            raise UserError(
                "one sample alone does not fit into GPU memory",
                where=guarded.items.key(indices[0]),
                fix="lower --image-max-pixels or --max-length, or use a larger GPU",
            ) from None
        scores = None
    statistics.batches += 1
    if scores is not None:
        statistics.real_tokens += int(batch["lengths"].sum())
        statistics.padded_tokens += batch["input_ids"].numel() - int(batch["lengths"].sum())
        return scores
    # Outside the except block, so that the failed forward's tensors are free before the halves run.
    torch.cuda.empty_cache()
    statistics.split_after_out_of_memory += 1
    logger.warning("a batch of %d samples does not fit into GPU memory; it is scored in halves", len(indices))
    half = len(indices) // 2
    scores = []
    for part in (indices[:half], indices[half:]):
        _, again = collate([guarded[index] for index in part])
        scores += _score(part, again, guarded, collate, scorer, device, statistics)
    return scores


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch's tensors on the device; ``rows``, ``lengths`` and ``label_counts`` stay on the host."""
    host = ("rows", "lengths", "label_counts")
    return {
        key: value.to(device, non_blocking=True)
        if isinstance(value, torch.Tensor) and key not in host
        else value
        for key, value in batch.items()
    }


def _check_finite(keys: Sequence[str], scores: Sequence[Sequence[float]]) -> None:
    for key, row in zip(keys, scores, strict=True):
        # -inf, inf and NaN alike: x - x is 0 for finite x only.
        if any(value - value != 0 for value in row):
            raise UserError(
                f"the model gives a number that is not finite ({', '.join(f'{value:g}' for value in row)})",
                where=f"sample {key}",
                fix="the training diverged or the precision is too narrow: try --precision fp32",
            )
