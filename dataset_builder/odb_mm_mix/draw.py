"""Random choices that are the same on every machine.

Python guarantees the sequence of ``Random.random()`` for a seed, not that of ``choice``, ``shuffle`` or
``sample``; NumPy does not guarantee its generators' streams across versions. So everything is drawn from
``random()``.
"""

from __future__ import annotations

import random
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A stream of choices named by its seed and purpose; two purposes never share a stream."""

    def __init__(self, seed: int, *purpose: object) -> None:
        self._random = random.Random("/".join(str(part) for part in (seed, *purpose)))

    def below(self, limit: int) -> int:
        """An integer in ``[0, limit)``."""
        return int(self._random.random() * limit)

    def between(self, low: int, high: int) -> int:
        """An integer in ``[low, high]``."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random.random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One of ``items``."""
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Shuffle in place (Fisher-Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` different items in random order."""
        pool = list(items)
        self.shuffle(pool)
        return pool[:count]
