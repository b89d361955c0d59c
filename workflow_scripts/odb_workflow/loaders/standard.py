"""Fixed batches: the same number of samples in every batch, in the random order of the epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .epoch_plan import rank_shard


def fixed_batches(
    positions: Sequence[int] | np.ndarray, batch_size: int, world_size: int, rank: int
) -> list[list[int]]:
    """Batches of one rank: ``batch_size`` samples each, the last one smaller.

    All ranks get equally many batches of equal sizes, because their shards are padded to the same length.
    """
    shard = rank_shard(positions, world_size, rank)
    return [shard[start : start + batch_size] for start in range(0, len(shard), batch_size)]
