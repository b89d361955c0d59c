"""Offline oracle: lengths are known beforehand, batches are filled to the token budget.

This is what ODB approximates online without a pass over the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_budget_batches(
    positions: Sequence[int] | np.ndarray,
    lengths: np.ndarray,
    token_budget: int,
    world_size: int,
    rank: int,
    seed: int,
    padding: str = "pad",
) -> list[list[int]]:
    """Batches of one rank, each of at most ``token_budget`` tokens (a longer sample is a batch of its own).

    With ``padding="pad"`` samples are sorted by length and a batch costs its size times its longest sample;
    with ``"pack"`` nothing is padded, so that the random order of the epoch is kept and a batch costs its
    sum. Full batches are split until their number is a multiple of ``world_size``: every sample is emitted
    once, without padding duplicates (unless there are fewer samples than ranks). Batches of one step have
    like cost.

    Args:
        positions: order of the epoch, [n].
        lengths: tokens of every training sample, indexed by position.
        seed: seed of the shuffle of steps; the same on all ranks.
    """
    order = np.asarray([*positions, *budget_duplicates(positions, world_size)], dtype=np.int64)
    if padding == "pad":
        order = order[np.argsort(-lengths[order], kind="stable")]
    batches = _fill(order, lengths, token_budget, padding)
    _split_to_multiple(batches, world_size)
    steps = [batches[start : start + world_size] for start in range(0, len(batches), world_size)]
    return [steps[i][rank] for i in np.random.default_rng(seed).permutation(len(steps))]


def budget_duplicates(positions: Sequence[int] | np.ndarray, world_size: int) -> list[int]:
    """Positions emitted twice because there are fewer samples than ranks; else none."""
    count = len(positions)
    return [int(positions[i % count]) for i in range(world_size - count)] if count else []


def _fill(order: np.ndarray, lengths: np.ndarray, budget: int, padding: str) -> list[list[int]]:
    batches: list[list[int]] = []
    current: list[int] = []
    cost = 0
    for position in order.tolist():
        length = int(lengths[position])
        grown = (len(current) + 1) * int(lengths[current[0]] if current else length)
        if padding == "pack":
            grown = cost + length
        if current and grown > budget:
            batches.append(current)
            current, grown = [], length
        current.append(position)
        cost = grown
    if current:
        batches.append(current)
    return batches


def _split_to_multiple(batches: list[list[int]], world_size: int) -> None:
    """Halve the largest batches until the number of batches is a multiple of the ranks, in place."""
    while len(batches) % world_size:
        largest = max(range(len(batches)), key=lambda i: len(batches[i]))
        batch = batches[largest]
        half = len(batch) // 2
        batches[largest : largest + 1] = [batch[:half], batch[half:]]
