"""Which samples an epoch emits, in which order, and which rank gets them.

Positions are indices into the training rows (0..n-1). Everything here is a pure function of counts and seeds,
so every rank computes the same plan without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch.utils.data import DistributedSampler


def epoch_positions(n_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The random order of one epoch: a permutation of ``range(n_samples)``, int64 [n_samples].

    The order is that of ``DistributedSampler`` with one replica after ``set_epoch(epoch)``.
    """
    if n_samples == 0:
        return np.empty(0, dtype=np.int64)
    sampler = DistributedSampler(range(n_samples), num_replicas=1, rank=0, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return np.fromiter(sampler, dtype=np.int64, count=n_samples)


def epoch_lengths(n_samples: int, epochs: float) -> list[int]:
    """Samples to emit in each epoch; a fraction of an epoch takes the head of its order.

    ``epochs=2.5`` with 10 samples gives ``[10, 10, 5]``. At least one sample is emitted.
    """
    whole, fraction = int(epochs), epochs - int(epochs)
    lengths = [n_samples] * whole
    rest = round(fraction * n_samples)
    if rest or not lengths:
        lengths.append(max(rest, 1))
    return lengths


def padded_positions(positions: Sequence[int] | np.ndarray, world_size: int) -> list[int]:
    """The positions that are emitted twice so that all ranks get equally many; at most ``world_size - 1``.

    They are the first ones of ``positions``, which is the rule of ``DistributedSampler``.
    """
    count = len(positions)
    if count == 0:
        return []
    missing = math.ceil(count / world_size) * world_size - count
    return [int(positions[i % count]) for i in range(missing)]


def rank_shard(positions: Sequence[int] | np.ndarray, world_size: int, rank: int) -> list[int]:
    """The positions of one rank: padded to a multiple of ``world_size``, then every ``world_size``-th.

    Shards that differ by one sample make ODB lose a sample or emit an extra step on one rank, so that all
    shards are padded to the same length.
    """
    if len(positions) == 0:
        return []
    sampler = DistributedSampler(range(len(positions)), num_replicas=world_size, rank=rank, shuffle=False)
    return [int(positions[i]) for i in sampler]


def remaining_positions(positions: np.ndarray, emitted: np.ndarray) -> np.ndarray:
    """The positions not emitted yet, in epoch order."""
    return positions[~np.isin(positions, emitted)]
