"""One training run: the state that the loop works on, and what it does between steps."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ..loaders.epoch_plan import epoch_lengths, epoch_positions, remaining_positions
from ..loaders.factory import LoaderSettings, build_epoch_loader, planned_duplicates
from .agreement import AllRanksError, Ranks
from .audit import EpochAudit, audit_epoch, summarize
from .book import StepBook, Totals
from .data import TrainingData
from .engines import Engine
from .process import StopRequest
from .resume import ResumePoint, save_resume_point
from .schedule import Schedule
from .step_log import Progress, StepLog
from .steps import Mover, Step

logger = logging.getLogger(__name__)


class TrainingRun:
    """Everything the training loop needs, put together by ``program.train``.

    Args:
        fingerprint: what a resume point must have equal.
        point: the resume point to continue from, or None.
        log: called with each entry of the step log on rank 0 (trackers).
        batch_size_search: how ``settings.fixed_batch_size`` was found; a resumed run keeps it.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        settings: LoaderSettings,
        data: TrainingData,
        collate: Callable[[list[dict]], dict[str, Any]],
        engine: Engine,
        ranks: Ranks,
        stop: StopRequest,
        mover: Mover,
        fingerprint: dict[str, Any],
        point: ResumePoint | None,
        log: Callable[[dict[str, Any]], None] | None = None,
        batch_size_search: dict[str, Any] | None = None,
    ) -> None:
        self.args, self.settings, self.data, self.collate = args, settings, data, collate
        self.engine, self.ranks, self.stop, self.mover = engine, ranks, stop, mover
        self.fingerprint = fingerprint
        self._log, self.batch_size_search = log, batch_size_search
        self.epoch_sizes = epoch_lengths(len(data.rows), args.epochs)
        self.schedule = Schedule(
            peak=args.lr,
            warmup_ratio=args.warmup_ratio,
            kind=args.lr_scheduler,
            total=float(self._planned_total()),
            max_steps=args.max_steps,
        )
        state = point.state if point else {}
        self.epoch: int = state.get("epoch", 0)
        self.segment: int = state["segment"] + 1 if point else 0
        self.batches_done: int = state.get("batches_done", 0)
        self.audits = [EpochAudit(**audit) for audit in state.get("audits", [])]
        self.duplicates: list[int] = state.get("duplicates", [])
        self.resumed_at_step: int | None = state["totals"]["step"] if point else None
        self._emitted: list[np.ndarray] = [point.emitted[ranks.rank]] if point else []
        self._emitted_anywhere = np.concatenate(point.emitted) if point else np.empty(0, dtype=np.int64)
        totals = Totals(**state["totals"]) if point else Totals()
        gpu = mover.device.type == "cuda"
        self.book = StepBook(
            ranks=ranks,
            every=args.logging_steps or (10 if gpu else 1),
            device=mover.device,
            write=self._write_entry,
            name_rows=data.names,
            tolerate_bad_norm=args.precision == "fp16",
            totals=totals,
        )
        self._step_log = StepLog(args.output_dir if ranks.is_main else None, totals.step)
        self._progress = Progress(sum(self.epoch_sizes), totals.samples, ranks.is_main, f"train {args.arm}")
        self._saved_samples, self._saved_time = totals.samples, time.monotonic()
        self.first_step_time: float | None = None

    def _planned_total(self) -> int:
        """Samples (padding duplicates aside) or label tokens of the whole run."""
        if self.args.schedule_basis == "samples":
            return sum(self.epoch_sizes)
        return sum(
            int(
                self.data.label_tokens[
                    epoch_positions(len(self.data.rows), self.args.seed, epoch)[:size]
                ].sum()
            )
            for epoch, size in enumerate(self.epoch_sizes)
        )

    def remaining_epochs(self) -> range:
        """Epochs still to train; the clock starts."""
        self.book.start_clock()
        return range(self.epoch, len(self.epoch_sizes))

    def epoch_plan(self, epoch: int) -> np.ndarray:
        """Positions that an epoch must emit, in its order: int64 [n]."""
        return epoch_positions(len(self.data.rows), self.args.seed, epoch)[: self.epoch_sizes[epoch]]

    @contextlib.contextmanager
    def open_epoch(self, epoch: int) -> Iterator[Any]:
        """The loader of an epoch, or of what a resumed epoch has left; its processes end with the block."""
        self.epoch = epoch
        positions = self.epoch_plan(epoch)
        if self.settings.kind == "odb":
            emitted = np.flatnonzero(np.isin(self.data.rows, self._emitted_anywhere))
            positions = remaining_positions(positions, emitted)
        planned = planned_duplicates(self.settings, positions, self.ranks.world_size)
        if self.settings.kind == "odb" or not self.duplicates:
            self.duplicates = self.duplicates + self.data.rows[planned].tolist()
        loader = build_epoch_loader(
            self.settings,
            self.data.dataset,
            self.collate,
            positions,
            self.data.lengths,
            epoch=epoch,
            segment=self.segment,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            batches_done=self.batches_done,
        )
        try:
            yield loader
            self.book.flush()
        finally:
            loader.close()

    def progress(self, step: Step) -> float:
        """Progress of the schedule in the middle of a step."""
        totals, counts = self.book.totals, step.counts
        if self.args.schedule_basis == "samples":
            return self.schedule.progress(totals.samples, counts.samples, totals.step)
        return self.schedule.progress(totals.label_tokens, counts.label_tokens, totals.step)

    def note(
        self, step: Step, epoch: int, rate: float, losses: list[torch.Tensor], norm: torch.Tensor | float
    ) -> None:
        """Take in a step that was trained on."""
        if self.first_step_time is None:
            self.first_step_time = time.monotonic()
        self._emitted.extend(micro.rows for micro in step.micro_batches)
        self.batches_done += len(step.micro_batches)
        self.book.totals.skipped_steps = self.engine.skipped_steps
        self.book.note(step, epoch, rate, losses, norm)

    def _write_entry(self, entry: dict[str, Any]) -> None:
        self._step_log.write(entry)
        self._progress.update(entry)
        if self._log and self.ranks.is_main:
            self._log(entry)

    def resume_point_due(self) -> bool:
        """Whether it is time for a resume point; rank 0 decides for all."""
        if not self.ranks.is_main:
            return False
        samples, minutes = self.args.checkpoint_every_samples, self.args.checkpoint_every_minutes
        if samples and self.book.totals.samples - self._saved_samples >= samples:
            return True
        return bool(minutes) and time.monotonic() - self._saved_time >= minutes * 60

    def _emitted_here(self) -> np.ndarray:
        return np.concatenate(self._emitted) if self._emitted else np.empty(0, dtype=np.int64)

    def save_resume_point(self) -> None:
        """Keep the state after the step just trained; called on all ranks."""
        self.book.flush()
        state = {
            "epoch": self.epoch,
            "segment": self.segment,
            "batches_done": self.batches_done,
            "duplicates": self.duplicates,
            "audits": [asdict(audit) for audit in self.audits],
            "totals": asdict(self.book.totals),
            "batch_size_search": self.batch_size_search,
        }
        save_resume_point(
            self.args.output_dir, self.fingerprint, state, self._emitted_here(), self.engine, self.ranks
        )
        self._saved_samples, self._saved_time = self.book.totals.samples, time.monotonic()
        logger.info("resume point kept after step %d", self.book.totals.step)

    def audit(self, epoch: int, finished: bool) -> EpochAudit:
        """The account of an epoch over all ranks; called on all ranks."""
        return audit_epoch(
            epoch,
            self.data.rows[self.epoch_plan(epoch)],
            self.ranks.gather_objects(self._emitted_here()),
            self.duplicates,
            finished,
        )

    def close_epoch(self, epoch: int) -> None:
        """Check that the epoch trained on each of its samples once.

        Raises:
            UserError: on all ranks, where it emitted nothing, or lost or doubled a sample.
        """
        audit = self.audit(epoch, finished=True)
        if audit.distinct == 0:
            raise AllRanksError(
                f"epoch {epoch + 1} emitted no sample of {audit.expected}",
                where=f"loader {self.settings.kind}",
                fix="raise --buffer-size or --num-workers; look at the loader's own messages above",
            )
        audit.check()
        self.audits.append(audit)
        self.epoch, self.segment, self.batches_done = epoch + 1, 0, 0
        self.duplicates, self._emitted = [], []
        self._emitted_anywhere = np.empty(0, dtype=np.int64)

    def finish(self, ending: str) -> dict[str, Any]:
        """Flush, close logs and return the audit of the run; called on all ranks."""
        self.book.flush()
        self.book.check_learned()
        if ending != "finished" and self._emitted:
            audit = self.audit(self.epoch, finished=False)
            audit.check()
            self.audits.append(audit)
        self._step_log.close()
        self._progress.close()
        return summarize(self.audits)

    def close(self) -> None:
        """Close logs after an error."""
        self._step_log.close()
        self._progress.close()
