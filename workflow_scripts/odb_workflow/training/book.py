"""The account of a run: what each step did, kept on the device until someone looks.

Losses and gradient norms leave the device by a copy that nobody waits for, and are read every few steps,
those of the newest steps excepted: the GPU always has work queued.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..model import compat
from .agreement import AllRanksError, Ranks
from .steps import Step


@dataclass
class Totals:
    """Counters of the whole run over all ranks; they survive a resume."""

    step: int = 0
    samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    label_tokens: int = 0
    loss_sum: float = 0.0
    data_wait_seconds: float = 0.0
    compile_seconds: float = 0.0
    runtime_seconds: float = 0.0
    skipped_steps: int = 0
    over_budget_batches: int = 0

    @property
    def mean_loss(self) -> float:
        """Mean loss per label token over the run."""
        return self.loss_sum / self.label_tokens if self.label_tokens else math.nan


STEPS_IN_FLIGHT = 2
"""Steps the host may be ahead of the GPU; more would only hold more batches in its memory."""


class _Numbers:
    """Summed loss and gradient norm of a step on their way from the device: float64 [2]."""

    def __init__(self, losses: list[torch.Tensor], norm: torch.Tensor | float) -> None:
        loss = torch.stack(losses).double().sum()
        norm = torch.as_tensor(norm, dtype=torch.float64, device=loss.device)
        self._values = torch.stack([loss, norm])
        self._done: torch.cuda.Event | None = None
        if self._values.is_cuda:
            here = torch.empty(2, dtype=torch.float64, pin_memory=True)
            self._values = here.copy_(self._values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> torch.Tensor:
        """The numbers, once the device has come to this step."""
        if self._done is not None:
            self._done.synchronize()
        return self._values


@dataclass
class _Pending:
    entry: dict[str, Any]
    numbers: _Numbers
    rows: np.ndarray


@dataclass
class StepBook:
    """Notes steps, and writes them out when flushed.

    Args:
        ranks: all ranks.
        every: steps between flushes.
        write: takes each finished entry of the step log; called on all ranks.
        name_rows: turns rows into ``id (source)`` texts for an error message.
        tolerate_bad_norm: fp16 skips steps whose gradient overflows; such a norm is then no error.
    """

    ranks: Ranks
    every: int
    device: torch.device
    write: Callable[[dict[str, Any]], None]
    name_rows: Callable[[np.ndarray], list[str]]
    tolerate_bad_norm: bool = False
    totals: Totals = field(default_factory=Totals)
    _pending: list[_Pending] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)
    _last: float = field(default_factory=time.perf_counter)
    _compiled_before: float = field(default_factory=compat.compile_seconds)
    _runtime_before: float = 0.0

    def start_clock(self) -> None:
        """Training begins now."""
        self._started = self._last = time.perf_counter()
        self._runtime_before = self.totals.runtime_seconds

    def runtime(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self._runtime_before + time.perf_counter() - self._started

    def note(
        self, step: Step, epoch: int, rate: float, losses: list[torch.Tensor], norm: torch.Tensor | float
    ) -> None:
        """Take in a step that was just launched; flushes when it is time."""
        now = time.perf_counter()
        totals, counts = self.totals, step.counts
        totals.step += 1
        totals.samples += counts.samples
        totals.real_tokens += counts.real_tokens
        totals.padded_tokens += counts.padded_tokens
        totals.label_tokens += counts.label_tokens
        totals.data_wait_seconds += step.data_wait_seconds
        compiled = compat.compile_seconds()
        compiling, self._compiled_before = compiled - self._compiled_before, compiled
        totals.compile_seconds += compiling
        entry = {
            "step": totals.step,
            "epoch": epoch,
            "samples": counts.samples,
            "samples_total": totals.samples,
            "real_tokens": counts.real_tokens,
            "padded_tokens": counts.padded_tokens,
            "label_tokens": counts.label_tokens,
            "lr": rate,
            "step_ms": (now - self._last) * 1e3,
            "data_wait_ms": step.data_wait_seconds * 1e3,
            "compile_ms": compiling * 1e3,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "elapsed_seconds": self.runtime(),
            "micro_batch_sizes": [len(micro.rows) for micro in step.micro_batches],
            "samples_per_rank": [rank.samples for rank in counts.per_rank],
            "real_tokens_per_rank": [rank.real_tokens for rank in counts.per_rank],
        }
        self._last = now
        rows = np.concatenate([micro.rows for micro in step.micro_batches])
        self._pending.append(_Pending(entry, _Numbers(losses, norm), rows))
        on_gpu = self.device.type == "cuda"
        if on_gpu and len(self._pending) > STEPS_IN_FLIGHT:
            self._pending[-1 - STEPS_IN_FLIGHT].numbers.wait()
        in_flight = STEPS_IN_FLIGHT if on_gpu else 0
        if len(self._pending) >= self.every + in_flight:
            self._read(len(self._pending) - in_flight)

    def flush(self) -> None:
        """Read the numbers of all steps, those still at work included, and write the log.

        Raises:
            UserError: on all ranks, for the first step whose loss or gradient norm is not finite.
        """
        self._read(len(self._pending))
        self.totals.runtime_seconds = self.runtime()

    def check_learned(self) -> None:
        """At the end: refuse a run of which no step was applied (fp16 skips those whose gradient overflows).

        Raises:
            UserError: on all ranks.
        """
        if self.totals.step and self.totals.skipped_steps == self.totals.step:
            raise AllRanksError(
                f"all {self.totals.step} steps were skipped: their gradients overflow fp16",
                fix="train with --precision bf16 or fp32, or lower --lr",
            )

    def _read(self, count: int) -> None:
        pending, self._pending = self._pending[:count], self._pending[count:]
        if not pending:
            return
        mine = torch.stack([item.numbers.wait() for item in pending])
        table = self.ranks.gather(mine)  # [ranks, steps, 2]
        self._check(table, pending)
        for number, item in enumerate(pending):
            loss_sum = float(table[:, number, 0].sum())
            self.totals.loss_sum += loss_sum
            entry = item.entry
            entry["loss"] = loss_sum / entry["label_tokens"]
            entry["grad_norm"] = float(table[0, number, 1])
            self.write(entry)

    def _check(self, table: torch.Tensor, pending: list[_Pending]) -> None:
        good = torch.isfinite(table)
        if self.tolerate_bad_norm:
            good[..., 1] = True
        if bool(good.all()):
            return
        number = int((~good).any(dim=2).any(dim=0).nonzero()[0])
        bad_ranks = (~good[:, number, 0]).nonzero().flatten().tolist()
        mine = self.name_rows(pending[number].rows) if self.ranks.rank in bad_ranks or not bad_ranks else []
        named = [text for texts in self.ranks.gather_objects(mine) for text in texts]
        what = "loss" if bad_ranks else "gradient norm"
        value = float(table[bad_ranks[0], number, 0]) if bad_ranks else float(table[0, number, 1])
        raise AllRanksError(
            f"the {what} of step {pending[number].entry['step']} is {value}",
            where="records "
            + ", ".join(named[:20])
            + (f" and {len(named) - 20} more" if len(named) > 20 else ""),
            fix="lower --lr or --max-grad-norm, train with --precision bf16 or fp32, "
            "or look at these records",
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return process_peak_bytes()


def process_peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
