"""What both evaluations do around their scoring: find the checkpoint, lock the folder, load the model,
write.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from odb_workflow.loaders.collate import Collator
from odb_workflow.model.forward import build_forward
from odb_workflow.model.load import DTYPES, load_model, load_processor, pad_token_id
from odb_workflow.model.performance import PerformanceSettings
from odb_workflow.runtime.errors import UserError
from odb_workflow.runtime.lock import folder_lock
from odb_workflow.runtime.log import setup_logging
from odb_workflow.runtime.provenance import now, provenance, without_home

from .arguments import check_common_arguments, choose_precision, choose_token_budget
from .checkpoint import Checkpoint, processor_fallback, resolve_checkpoint
from .publish import publish
from .ranks import EvaluationRanks, start_ranks
from .runner import RunStatistics, WorkerSettings, default_workers

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """One evaluation of one checkpoint on this rank."""

    ranks: EvaluationRanks
    checkpoint: Checkpoint
    processor_source: str | None
    folder: Path
    precision: str
    token_budget: int
    packed: bool
    performance: PerformanceSettings
    started: str
    start: float

    def settings(self) -> dict[str, Any]:
        """What of the session decides the results; part of the fingerprint of partial results."""
        return {
            "checkpoint_sha256": self.checkpoint.sha256,
            "precision": self.precision,
            "device_type": self.ranks.device.type,
            "performance": self.performance.mode,
        }

    def identity(self) -> dict[str, Any]:
        """What results say about the checkpoint."""
        return {
            "checkpoint": without_home(self.checkpoint.given),
            "checkpoint_sha256": self.checkpoint.sha256,
            "arm": self.checkpoint.arm,
            "processor_source": self.processor_source,
            "dtype": self.precision,
        }


@contextlib.contextmanager
def open_session(arguments: argparse.Namespace, default_folder: str) -> Iterator[Session]:
    """Start the ranks, find the checkpoint, and hold the lock of the results folder.

    Raises:
        UserError: see ``start_ranks`` and ``resolve_checkpoint``; or the folder cannot be written or is in
            use.
    """
    setup_logging(rank=int(os.environ.get("RANK", "0")))
    started, start = now(), time.perf_counter()
    ranks = start_ranks(arguments.device)
    if not ranks.main:
        transformers.utils.logging.disable_progress_bar()
    try:
        ranks.together(lambda: check_common_arguments(arguments))
        performance = ranks.together(lambda: PerformanceSettings.parse(arguments.performance))

        def find() -> tuple[dict[str, Any], str | None]:
            checkpoint = resolve_checkpoint(arguments.checkpoint, revision=arguments.revision)
            return checkpoint.to_dict(), processor_fallback(checkpoint, arguments.base_model)

        found, source = ranks.main_only(find)
        checkpoint = Checkpoint.from_dict(found)
        folder = Path(arguments.output_dir) if arguments.output_dir else checkpoint.home / default_folder
        precision = choose_precision(arguments.precision, ranks.device.type)
        packed = arguments.padding == "pack" or (
            arguments.padding == "auto"
            and ranks.device.type == "cuda"
            and precision != "fp32"
            and performance.mode != "reference"
        )
        session = Session(
            ranks=ranks,
            checkpoint=checkpoint,
            processor_source=source,
            folder=folder,
            precision=precision,
            token_budget=choose_token_budget(arguments.token_budget, ranks.device.type),
            packed=packed,
            performance=performance,
            started=started,
            start=start,
        )
        with contextlib.ExitStack() as stack:
            ranks.main_only(lambda: stack.enter_context(_locked(folder)) and None)
            yield session
    finally:
        ranks.close()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        lock = folder_lock(folder, "an evaluation")
        lock.__enter__()
    except OSError as error:
        raise UserError(
            f"the results folder cannot be written: {error.strerror}",
            where=str(folder),
            fix="give --output-dir (ODB_ACCEL_EVAL_OUTPUT_ROOT)",
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def load_session_processor(session: Session, arguments: argparse.Namespace) -> Any:
    """The processor of the checkpoint, or of the base model where it has none."""
    given = session.processor_source is not None and session.processor_source == arguments.base_model
    return session.ranks.together(
        lambda: load_processor(
            session.processor_source or str(session.checkpoint.model_dir),
            arguments.image_max_pixels or None,
            trust_remote_code=arguments.trust_remote_code,
            revision=arguments.base_model_revision if given else None,
        )
    )


def load_session_forward(session: Session, arguments: argparse.Namespace, expected_tokens: int) -> Any:
    """The model on this rank's device, ready to score."""

    def load() -> Any:
        model = load_model(
            str(session.checkpoint.model_dir),
            dtype=DTYPES[session.precision],
            trust_remote_code=arguments.trust_remote_code,
            attn_implementation=arguments.attn_implementation,
        )
        return build_forward(
            model,
            session.performance,
            session.ranks.device,
            training=False,
            expected_tokens=expected_tokens // session.ranks.world_size,
        )

    return session.ranks.together(load)


def make_collator(session: Session, forward: Any, processor: Any) -> Collator:
    """The collator that fits the model and the session's padding."""
    return Collator.from_config(
        forward.model.config,
        pad_token_id=session.ranks.together(lambda: pad_token_id(processor)),
        padding="pack" if session.packed else "pad",
        pixel_dtype=session.performance.pixel_dtype(session.precision),
        host_metadata=forward.switches.get("mode") == "fast",
    )


def make_worker_settings(session: Session, arguments: argparse.Namespace) -> WorkerSettings:
    """Workers and prefetch, chosen by device unless given."""
    workers = arguments.num_workers
    if workers < 0:
        workers = default_workers(session.ranks.device, session.ranks.local_world_size)
    return WorkerSettings(workers, arguments.prefetch_factor)


def publish_results(
    session: Session,
    documents: Mapping[str, Any],
    *,
    statistics: RunStatistics,
    switches: Mapping[str, Any],
    loader: WorkerSettings,
    extra: Mapping[str, Any],
) -> None:
    """Write all result files and the record of this run; rank 0 only.

    What differs between two runs of the same evaluation (times, speed, ranks, batches) is in
    ``run_record.json`` alone, so that the result files of an interrupted and of an uninterrupted run are
    equal byte for byte.
    """
    seconds = statistics.seconds
    record = {
        **provenance(),
        **extra,
        "started": session.started,
        "ended": now(),
        "total_seconds": time.perf_counter() - session.start,
        "scoring_seconds": seconds,
        "data_wait_seconds": statistics.wait_seconds,
        "samples_reused_from_an_earlier_run": statistics.reused,
        "samples_scored_on_rank_0": statistics.samples,
        "samples_per_second_on_rank_0": statistics.samples / seconds if seconds else None,
        "real_tokens_per_second_on_rank_0": statistics.real_tokens / seconds if seconds else None,
        "padding_ratio_on_rank_0": statistics.padded_tokens
        / max(statistics.padded_tokens + statistics.real_tokens, 1),
        "batches_on_rank_0": statistics.batches,
        "batches_split_after_out_of_memory": statistics.split_after_out_of_memory,
        "peak_memory_bytes_gpu": statistics.peak_memory_bytes,
        "world_size": session.ranks.world_size,
        "device": torch.cuda.get_device_name(session.ranks.device)
        if session.ranks.device.type == "cuda"
        else "cpu",
        "threads": torch.get_num_threads(),
        "token_budget": session.token_budget,
        "padding": "pack" if session.packed else "pad",
        "num_workers": loader.num_workers,
        "performance_switches": dict(switches),
    }
    publish(session.folder, {"run_record.json": record, **documents})
