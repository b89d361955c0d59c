"""What the ranks tell each other before every optimizer step: one small message on the CPU.

The message decides whether there is a step at all, so that a rank whose loader ended early can never leave
the others waiting in a collective operation of the model; it also carries the counts that the loss is scaled
by.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from ..runtime.errors import UserError

FIELDS = (
    "batches",
    "samples",
    "real_tokens",
    "padded_tokens",
    "label_tokens",
    "stop",
    "save",
    "failed",
    "odb_samples",
)


class AllRanksError(UserError):
    """A fault that every rank has seen and raises; only rank 0 needs to print it."""


@dataclass
class RankCounts:
    """What one rank brings to a step; summed over its micro-batches."""

    batches: int = 0
    samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    label_tokens: int = 0
    stop: int = 0
    save: int = 0
    failed: int = 0
    odb_samples: int = 0


@dataclass(frozen=True)
class StepCounts:
    """The same over all ranks."""

    samples: int
    real_tokens: int
    padded_tokens: int
    label_tokens: int
    stop: bool
    save: bool
    per_rank: list[RankCounts] = field(repr=False)

    @property
    def has_step(self) -> bool:
        """Whether there is a batch on every rank."""
        return self.per_rank[0].batches > 0


class Ranks:
    """The group of all ranks, with messages that never touch the GPU.

    Args:
        rank, world_size: of the launcher.
        timeout_seconds: how long a rank waits for the others' message.
    """

    def __init__(self, rank: int, world_size: int, timeout_seconds: float = 1800) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = None
        if world_size > 1:
            timeout = datetime.timedelta(seconds=timeout_seconds)
            self._group = distributed.new_group(backend="gloo", timeout=timeout)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """[k] of every rank as [world_size, k], on the CPU."""
        if self._group is None:
            return vector[None]
        out = [torch.empty_like(vector) for _ in range(self.world_size)]
        distributed.all_gather(out, vector.contiguous(), group=self._group)
        return torch.stack(out)

    def gather_objects(self, value: Any) -> list[Any]:
        """Any picklable value of every rank, in the order of ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self._group is None:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._group is not None:
            distributed.barrier(group=self._group)

    def agree(self, mine: RankCounts) -> StepCounts:
        """Exchange the counts of a step.

        Raises:
            UserError: on all ranks, where some have a batch and some have none (or another number of
                batches), or where a rank could not load its batch.
        """
        vector = torch.tensor([getattr(mine, name) for name in FIELDS], dtype=torch.int64)
        table = self.gather(vector).tolist()
        ranks = [RankCounts(*row) for row in table]
        failed = [rank for rank, counts in enumerate(ranks) if counts.failed]
        if failed:
            raise AllRanksError(
                f"stopped because rank {failed[0]} could not load its batch; its own message says why"
            )
        if len({counts.batches for counts in ranks}) > 1:
            have = ", ".join(f"rank {rank}: {counts.batches}" for rank, counts in enumerate(ranks))
            raise AllRanksError(
                f"the ranks do not have equally many batches for this step ({have}); all ranks stop",
                fix="each rank must be given equally many samples; with odb leave --join on",
            )
        return StepCounts(
            samples=sum(counts.samples for counts in ranks),
            real_tokens=sum(counts.real_tokens for counts in ranks),
            padded_tokens=sum(counts.padded_tokens for counts in ranks),
            label_tokens=sum(counts.label_tokens for counts in ranks),
            stop=any(counts.stop for counts in ranks),
            save=any(counts.save for counts in ranks),
            per_rank=ranks,
        )
