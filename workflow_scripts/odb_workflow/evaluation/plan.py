"""Which samples share a batch, and which rank scores which batch.

The plan depends on the lengths and the budget alone, never on the number of ranks or on what an earlier run
left
behind: a batch therefore has the same samples, and the same bits come out, on one rank, on three, or after a
restart.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan_batches(
    lengths: Sequence[int], token_budget: int, *, packed: bool = False, max_samples: int = 256
) -> list[list[int]]:
    """Group samples of like length into batches of at most ``token_budget`` tokens, the longest first.

    Longest first, so that a batch that does not fit into memory shows at once. Ties go by index.

    Args:
        lengths: Tokens of each sample.
        token_budget: Most tokens a batch may take: longest length x samples when padded, their sum when
            packed. A sample longer than the budget is a batch of its own.
        packed: Count the sum of lengths instead of the padded area.
        max_samples: Most samples in a batch, whatever their length.

    Returns:
        Lists of indices into ``lengths``; each index once.

    Raises:
        ValueError: the budget or ``max_samples`` is not positive.
    """
    if token_budget < 1 or max_samples < 1:
        raise ValueError("token_budget and max_samples must be positive")
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        batch = batches[-1] if batches else None
        # Lengths fall, so the first sample of a batch is its longest.
        area = tokens + length if packed else lengths[batch[0]] * (len(batch) + 1) if batch else 0
        if batch is None or area > token_budget or len(batch) >= max_samples:
            batches.append([index])
            tokens = length
        else:
            batch.append(index)
            tokens += length
    return batches


def remaining_batches(batches: Sequence[Sequence[int]], done: set[int]) -> list[list[int]]:
    """The batches without the samples that are already scored; empty ones are left out."""
    kept = ([index for index in batch if index not in done] for batch in batches)
    return [batch for batch in kept if batch]


def batches_of_rank(batches: Sequence[list[int]], rank: int, world_size: int) -> list[list[int]]:
    """The batches of one rank, dealt in turn: each batch to exactly one rank, none repeated to even them
    out.
    """
    return list(batches[rank::world_size])
