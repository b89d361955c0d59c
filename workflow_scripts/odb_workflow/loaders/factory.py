"""From the settings of an arm to the loader of one epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runtime.errors import UserError
from .batches import PlannedBatchLoader
from .epoch_plan import padded_positions, rank_shard
from .length_grouped import length_grouped_batches
from .standard import fixed_batches
from .token_budget import budget_duplicates, token_budget_batches

logger = logging.getLogger(__name__)

LOADER_KINDS = ("odb", "standard", "length_grouped", "token_budget")
FIXED_BATCH_KINDS = ("standard", "length_grouped")

EpochLoader = Any  # OdbLoader | PlannedBatchLoader; odb is imported only where it is used


@dataclass(frozen=True)
class LoaderSettings:
    """Which batches, and how many processes make them.

    Attributes:
        kind: one of ``LOADER_KINDS``.
        token_budget: most tokens in a batch (``odb``, ``token_budget``).
        buffer_size: samples that odb looks at together.
        odb_loss_scaling: what odb computes: ``none``, ``approx`` or ``exact``.
        fixed_batch_size: samples in a batch (``standard``, ``length_grouped``).
        padding: ``pad`` or ``pack``; ``token_budget`` counts a batch's cost by it.
        num_workers: processes that read and process samples, per rank.
        prefetch_factor: samples (``odb``) or batches each worker prepares ahead.
    """

    kind: str
    token_budget: int = 0
    buffer_size: int = 1024
    odb_loss_scaling: str = "none"
    join: bool = True
    no_warmup: bool = False
    group_order_flip: str = "none"
    max_patches: int = 0
    fixed_batch_size: int = 1
    padding: str = "pad"
    num_workers: int = 4
    prefetch_factor: int | None = None
    seed: int = 42


def check_loader_settings(settings: LoaderSettings, shortest: int, samples_per_rank: int = 0) -> None:
    """Refuse settings that cannot work, before any work is done.

    Args:
        shortest: tokens of the shortest training sample.
        samples_per_rank: samples of a rank in an epoch; below one buffer nothing is prefetched beyond it.

    Raises:
        UserError: names the key, its value and what to give instead.
    """
    if settings.kind not in LOADER_KINDS:
        raise UserError(f"unknown loader {settings.kind!r}", fix=f"give one of {', '.join(LOADER_KINDS)}")
    if settings.kind in ("odb", "token_budget") and settings.token_budget < 1:
        raise UserError(
            f"token budget is {settings.token_budget}; it must be at least 1", where="--token-budget"
        )
    if settings.kind in FIXED_BATCH_KINDS and settings.fixed_batch_size < 1:
        raise UserError(
            f"batch size is {settings.fixed_batch_size}; it must be at least 1", where="--fixed-batch-size"
        )
    if settings.kind != "odb":
        return
    if settings.num_workers < 1:
        raise UserError(
            f"the odb loader needs worker processes, but num_workers is {settings.num_workers}",
            where="--num-workers",
            fix="give at least 1",
        )
    fullest = max(settings.token_budget // max(shortest, 1), 1)
    if settings.buffer_size < min(fullest, 2):
        raise UserError(
            f"buffer size {settings.buffer_size} is too small: odb would form batches of one sample",
            where="--buffer-size",
            fix=f"give at least {fullest}, which lets a batch of the shortest samples reach the token budget",
        )
    # While the batches of one buffer are trained on, samples of the next are made only as far as the prefetch
    # reaches: measured 30 % of the time waiting with a prefetch of one buffer, 7 % with two.
    ahead = settings.num_workers * (settings.prefetch_factor or 2)
    if ahead < 2 * settings.buffer_size < 2 * samples_per_rank:
        logger.warning(
            "prefetch factor %s times %d workers reaches %d samples ahead, less than two buffers of %d: "
            "training will wait for data at each buffer; give --prefetch-factor %d",
            settings.prefetch_factor,
            settings.num_workers,
            ahead,
            settings.buffer_size,
            math.ceil(2 * settings.buffer_size / settings.num_workers),
        )


def build_epoch_loader(
    settings: LoaderSettings,
    dataset: Any,
    collate: Callable[[list[dict]], dict[str, Any]],
    positions: np.ndarray,
    lengths: np.ndarray,
    *,
    epoch: int,
    segment: int,
    rank: int,
    world_size: int,
    batches_done: int = 0,
) -> EpochLoader:
    """The loader of one rank for ``positions``, the samples this epoch has still to emit.

    Args:
        dataset: map-style, indexed by position.
        positions: int64 [n], in epoch order. For planned loaders the whole epoch, also when it is resumed.
        lengths: tokens of every training sample, indexed by position.
        epoch, segment: which epoch, and how often it was resumed; they choose seeds and names.
        batches_done: batches of this rank to leave out (planned loaders, resumed epoch).
    """
    if settings.kind == "odb" and len(positions):
        from .odb_loader import OdbLoader

        return OdbLoader(
            dataset,
            rank_shard(positions, world_size, rank),
            collate,
            settings,
            iterator_seed=(settings.seed * 1_000_003 + epoch * 1_009 + segment) % 1_000_000_007,
        )
    shuffle_seed = settings.seed * 1_000_003 + epoch
    if settings.kind == "odb":  # an epoch that was resumed after its last batch
        batches: list[list[int]] = []
    elif settings.kind == "standard":
        batches = fixed_batches(positions, settings.fixed_batch_size, world_size, rank)
    elif settings.kind == "length_grouped":
        batches = length_grouped_batches(
            positions, lengths, settings.fixed_batch_size, world_size, rank, shuffle_seed
        )
    else:
        batches = token_budget_batches(
            positions, lengths, settings.token_budget, world_size, rank, shuffle_seed, settings.padding
        )
    return PlannedBatchLoader(
        dataset,
        batches[batches_done:],
        collate,
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor,
    )


def planned_duplicates(settings: LoaderSettings, positions: np.ndarray, world_size: int) -> list[int]:
    """Positions that are emitted twice on purpose, so that all ranks get equally many samples."""
    if settings.kind == "token_budget":
        return budget_duplicates(positions, world_size)
    return padded_positions(positions, world_size)
