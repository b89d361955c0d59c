"""Fixed batch size, grouped by length within mega-batches, as transformers does it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .epoch_plan import padded_positions

MEGA_BATCH_FACTOR = 50


def length_grouped_batches(
    positions: Sequence[int] | np.ndarray,
    lengths: np.ndarray,
    batch_size: int,
    world_size: int,
    rank: int,
    seed: int,
) -> list[list[int]]:
    """Batches of one rank.

    The random order of the epoch is cut into mega-batches of ``50 * batch_size * world_size`` samples; each
    is sorted by length and cut into global batches, whose order is then shuffled. The samples of one global
    batch are dealt to the ranks in turn, so that all ranks get equally many samples of like length in every
    step.

    Args:
        positions: order of the epoch, [n].
        lengths: tokens of every training sample, indexed by position.
        seed: seed of the shuffle of global batches; the same on all ranks.
    """
    padded = np.asarray([*positions, *padded_positions(positions, world_size)], dtype=np.int64)
    global_size = batch_size * world_size
    shuffle = np.random.default_rng(seed)
    batches: list[list[int]] = []
    for start in range(0, len(padded), MEGA_BATCH_FACTOR * global_size):
        mega = padded[start : start + MEGA_BATCH_FACTOR * global_size]
        mega = mega[np.argsort(-lengths[mega], kind="stable")]
        steps = [mega[i : i + global_size] for i in range(0, len(mega), global_size)]
        batches.extend(steps[i][rank::world_size].tolist() for i in shuffle.permutation(len(steps)))
    return batches
