"""From micro-batches of a loader to optimizer steps that all ranks have agreed on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime.errors import UserError
from .agreement import AllRanksError, RankCounts, Ranks, StepCounts
from .loss_scaling import MicroBatchCounts
from .process import StopRequest

HOST_KEYS = ("rows", "lengths", "label_counts")
ODB_INFO_KEY = "odb_info"


@dataclass
class MicroBatch:
    """One batch of one rank: what goes to the device, and what the loop needs to know about it."""

    tensors: dict[str, Any]
    rows: np.ndarray
    counts: MicroBatchCounts
    padded_tokens: int
    odb_samples: int | None

    @classmethod
    def from_batch(cls, batch: dict[str, Any]) -> MicroBatch:
        """Split a collated batch (see ``Collator``) from its host-side account."""
        info = batch.pop(ODB_INFO_KEY, None)
        real = int(batch["lengths"].sum())
        return cls(
            tensors=batch,
            rows=batch["rows"].numpy(),
            counts=MicroBatchCounts(
                label_tokens=int(batch["label_counts"].sum()),
                real_tokens=real,
                odb_scale=None if info is None else float(info.loss_scale),
            ),
            padded_tokens=batch["input_ids"].numel() - real,
            odb_samples=None if info is None else int(info.all_samples_this_step),
        )


@dataclass
class Step:
    """The micro-batches of this rank in one optimizer step, and the counts over all ranks."""

    micro_batches: list[MicroBatch]
    counts: StepCounts
    data_wait_seconds: float


class Mover:
    """Copies batches to the device: page-locked and on a stream of its own where that is a GPU."""

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self.device, self.pinned = device, pinned
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and pinned else None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.device.type == "cpu":
            return batch
        if self._stream is None:
            return {
                key: value.to(self.device) if torch.is_tensor(value) and key not in HOST_KEYS else value
                for key, value in batch.items()
            }
        compute = torch.cuda.current_stream(self.device)
        moved = dict(batch)
        with torch.cuda.stream(self._stream):
            for key, value in batch.items():
                if torch.is_tensor(value) and key not in HOST_KEYS:
                    moved[key] = value.pin_memory().to(self.device, non_blocking=True)
        compute.wait_stream(self._stream)
        for key, value in moved.items():
            if torch.is_tensor(value) and key not in HOST_KEYS:
                value.record_stream(compute)
        return moved


def agreed_steps(
    loader: Iterator[dict[str, Any]],
    ranks: Ranks,
    stop: StopRequest,
    mover: Mover,
    accumulation_steps: int,
    save_due: Any,
) -> Iterator[Step]:
    """Yield optimizer steps until every rank's loader is exhausted.

    The next step is fetched when the loop asks for it, that is while the GPU still works on the one before.

    Args:
        accumulation_steps: micro-batches of each rank in a step; the last step of an epoch may have fewer.
        save_due: called without arguments; whether this rank wants a resume point after the step.

    Raises:
        UserError: on all ranks, where they do not have equally many batches, or one failed to load its own.
    """
    iterator = iter(loader)
    while True:
        began = time.perf_counter()
        micro_batches: list[MicroBatch] = []
        failure: Exception | None = None
        try:
            while len(micro_batches) < accumulation_steps:
                batch = next(iterator, None)
                if batch is None:
                    break
                micro_batches.append(MicroBatch.from_batch(batch))
        except Exception as error:  # told to the other ranks before it is raised here
            failure = error
        waited = time.perf_counter() - began
        mine = RankCounts(
            batches=len(micro_batches),
            samples=sum(len(micro.rows) for micro in micro_batches),
            real_tokens=sum(micro.counts.real_tokens for micro in micro_batches),
            padded_tokens=sum(micro.padded_tokens for micro in micro_batches),
            label_tokens=sum(micro.counts.label_tokens for micro in micro_batches),
            stop=int(stop.wanted),
            save=int(save_due()),
            failed=int(failure is not None),
            odb_samples=sum(micro.odb_samples or 0 for micro in micro_batches),
        )
        try:
            counts = ranks.agree(mine)
        except UserError as error:
            raise failure or error from None
        if not counts.has_step:
            return
        _check_odb_samples(micro_batches, counts)
        if counts.label_tokens == 0:
            rows = np.concatenate([micro.rows for micro in micro_batches]).tolist()
            raise AllRanksError(
                "no label tokens in a whole step: there is nothing to learn from it",
                where=f"rows {rows[:20]} of records.jsonl",
                fix="drop these records, or raise --max-length so that their answers are not cut off",
            )
        for micro in micro_batches:
            micro.tensors = mover(micro.tensors)
        yield Step(micro_batches, counts, waited)


def _check_odb_samples(micro_batches: list[MicroBatch], counts: StepCounts) -> None:
    if micro_batches[0].odb_samples is None:
        return
    said = sum(micro.odb_samples or 0 for micro in micro_batches)
    if said != counts.samples:
        raise AllRanksError(
            f"odb counted {said} samples for this step over all ranks, the ranks have {counts.samples}: "
            "their batches do not belong together",
            fix="every rank must iterate its loader in step; leave --join on",
        )
