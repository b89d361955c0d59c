"""From the command line to a trained arm: puts the run together and writes its results."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from transformers.utils.logging import disable_progress_bar

from ..loaders.collate import Collator
from ..loaders.factory import FIXED_BATCH_KINDS, check_loader_settings
from ..model.compat import check_versions
from ..model.forward import build_forward
from ..model.freeze import apply_freezing
from ..model.load import DTYPES, check_model_path, load_model, load_processor, pad_token_id
from ..model.performance import PerformanceSettings
from ..runtime.errors import UserError
from ..runtime.files import atomic_write_json
from ..runtime.lock import folder_lock
from ..runtime.log import setup_logging
from ..runtime.provenance import now, provenance
from . import output
from .agreement import Ranks
from .arguments import AUTO, loader_settings, training_identity
from .batch_size import StepRehearsal, choose_batch_size
from .data import TrainingData, load_training_data
from .engines import DeepSpeedEngine, OptimizerSettings, PlainEngine
from .faults import setup_is_done
from .finished import keep_finished, publish_finished
from .loop import train_epochs
from .process import StopRequest
from .resume import ResumePoint, find_resume_point, remove_resume_points, restore_random_state
from .run import TrainingRun
from .setup import check_equal_on_ranks, deepspeed_settings, make_accelerator, use_cpu
from .staging import staged_copy
from .step_log import STEP_LOG_NAME
from .steps import Mover
from .summary import training_summary

logger = logging.getLogger(__name__)


def train(args: argparse.Namespace, code_version: int, process_start: float) -> int:
    """Train one arm; returns the exit status (0, or 128 + signal for a run that was told to stop).

    Args:
        process_start: ``time.time()`` at which the process began.

    Raises:
        UserError: anything the user can mend; see ``runtime.errors``.
    """
    started = now()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    setup_logging("INFO" if rank == 0 else "ERROR")
    if not sys.stderr.isatty():
        disable_progress_bar()
    check_versions()
    cpu = use_cpu(args)
    performance = PerformanceSettings.parse(args.performance)
    if performance.checkpointing == "auto":
        performance = performance.with_checkpointing(args.gradient_checkpointing)
    deepspeed = deepspeed_settings(args)
    check_model_path(args.model)
    with StopRequest() as stop, _main_process_lock(args, rank):
        accelerator = make_accelerator(args, deepspeed, cpu)
        ranks = Ranks(rank, world_size)
        device = accelerator.device
        set_seed(args.seed)
        processor = load_processor(
            args.model,
            args.image_max_pixels,
            trust_remote_code=args.trust_remote_code,
            revision=args.revision,
        )
        if args.local_data:
            args.data = staged_copy(args.data, args.local_data)
        _validate_if_needed(args, processor, ranks)
        data = load_training_data(args, processor, performance.pixel_dtype(args.precision))
        settings = loader_settings(args)
        check_loader_settings(settings, int(data.lengths.min()), len(data.rows) // world_size)
        fingerprint = _fingerprint(args, deepspeed, data, world_size)
        check_equal_on_ranks(ranks, fingerprint["arguments"] | {"data": fingerprint["data"]})
        setup_is_done()
        ended = fingerprint | {
            "code_version": code_version,
            "attn_implementation": args.attn_implementation,
        }
        if _published_again(args, ended, ranks):
            return 0
        point = _find_point(args, fingerprint, ranks)

        forward, frozen = _build_model(args, performance, device, data)
        optimizer = OptimizerSettings(
            weight_decay=args.weight_decay,
            max_grad_norm=args.max_grad_norm,
            precision=args.precision,
            fused=performance.on("fused_optimizer", performance.mode != "reference"),
            sixteen_bit_states=args.optimizer_states == "16bit",
        )
        forward.switches["fused_optimizer"] = optimizer.fused
        if deepspeed is None:
            engine = PlainEngine(forward, device, world_size, optimizer)
        else:
            engine = DeepSpeedEngine(forward, accelerator, optimizer)
        if point:
            engine.load(point.folder)
            restore_random_state(point, rank)
            logger.info("continuing after step %d of an interrupted run", point.state["totals"]["step"])
            if args.loader == "odb":
                logger.info(
                    "odb groups the samples that are left anew: each is emitted once, but in other batches "
                    "than an uninterrupted run would form, so that the weights will differ from that run's"
                )
        if args.log_with:
            accelerator.init_trackers("train", config=_plain(training_identity(args)))
        collate = Collator.from_config(
            forward.model.config,
            pad_token_id(processor),
            args.padding,
            pixel_dtype=performance.pixel_dtype(args.precision),
            host_metadata=forward.switches["mode"] == "fast",
        )
        mover = Mover(device, performance.on("pinned_batches", device.type == "cuda"))
        search = None
        if args.fixed_batch_size == AUTO and args.loader in FIXED_BATCH_KINDS:
            if point:
                search = point.state["batch_size_search"]
            else:
                search = choose_batch_size(
                    StepRehearsal(data, collate, mover, engine),
                    getattr(forward, "plan", None),
                    most=-(-len(data.rows) // world_size),
                    ranks=ranks,
                )
            settings = dataclasses.replace(settings, fixed_batch_size=search["size"])
        run = TrainingRun(
            args,
            settings,
            data,
            collate,
            engine,
            ranks,
            stop,
            mover,
            fingerprint,
            point,
            log=_tracker(accelerator) if args.log_with else None,
            batch_size_search=search,
        )
        if ranks.is_main:
            output.begin_training(args.output_dir, args.model, args.arm)
        try:
            ending = train_epochs(run)
            audit = run.finish(ending)
        except RuntimeError as error:
            if not stop.wanted:
                raise
            # the signal also reached the loader's processes; their end is no fault of its own
            raise UserError(
                "stopped by a signal; the same command continues from the last resume point"
            ) from error
        finally:
            run.close()
            if args.log_with:
                accelerator.end_training()
        if ending == "stopped":
            logger.warning(
                "stopped by a signal after step %d; the same command continues", run.book.totals.step
            )
            return 128 + int(stop.signal_number or 15)

        if ranks.is_main:
            if args.save_final_model:
                output.save_model(args.output_dir, forward.model, processor)
            summary = training_summary(
                args,
                run.book.totals,
                ending=ending,
                audit=audit,
                split=data.split.describe() | {"train_samples": len(data.rows)},
                world_size=world_size,
                device=device,
                switches=forward.switches,
                startup_seconds=time.time()
                - process_start
                - (time.monotonic() - (run.first_step_time or 0.0)),
                started=started,
                resumed_at_step=run.resumed_at_step,
                trained={
                    "parameters": frozen.trained_parameters,
                    "of": frozen.total_parameters,
                    "parts": frozen.parts,
                },
                code_version=code_version,
                over_budget_samples=int((data.lengths > args.token_budget).sum()),
                batch_size_search=run.batch_size_search,
                deepspeed_stage=deepspeed["zero_optimization"]["stage"] if deepspeed else None,
            )
            _write_results(args, summary, fingerprint, ended)
        ranks.barrier()
    return 0


@contextlib.contextmanager
def _main_process_lock(args: argparse.Namespace, rank: int) -> Iterator[None]:
    with folder_lock(args.output_dir, f"training {args.arm}") if rank == 0 else contextlib.nullcontext():
        yield


def _validate_if_needed(args: argparse.Namespace, processor: Any, ranks: Ranks) -> None:
    """Without ``--validation`` the TMDB is validated into the output folder, by rank 0."""
    if args.validation:
        args.validation = Path(args.validation)
        return
    args.validation = args.output_dir / "tmdb_validation"
    if ranks.is_main:
        from ..tmdb.validate import validate_tmdb

        logger.info("no --validation given: validating %s first", args.data)
        validate_tmdb(args.data, processor, max_length=args.max_length, output_dir=args.validation)
    ranks.barrier()


def _fingerprint(
    args: argparse.Namespace, deepspeed: dict[str, Any] | None, data: TrainingData, world_size: int
) -> dict[str, Any]:
    ids = data.accepted.ids[data.accepted.positions(data.rows)]
    return {
        "arguments": training_identity(args),
        "deepspeed": deepspeed,
        "world_size": world_size,
        "data": data.accepted.data_checksum,
        "training_ids": output.hash_texts(ids.tolist()),
        "model": output.model_fingerprint(args.model),
    }


def _find_point(args: argparse.Namespace, fingerprint: dict[str, Any], ranks: Ranks) -> ResumePoint | None:
    """Rank 0 looks at the folder and finds the resume point; all ranks learn of it."""
    point = None
    if ranks.is_main:
        output.check_folder(args.output_dir, args.model, args.arm)
        point = find_resume_point(args.output_dir, fingerprint)
    return ranks.broadcast_object(point)


def _published_again(args: argparse.Namespace, ended: dict[str, Any], ranks: Ranks) -> bool:
    """This training had ended, only its Snakemake had not seen it: rank 0 publishes its results again."""
    published = False
    if ranks.is_main and publish_finished(args.output_dir, ended, bool(args.save_final_model)):
        published = True
        remove_resume_points(args.output_dir)
        logger.info("this training had ended before: its results are published, nothing is trained again")
    return ranks.broadcast_object(published)


def _build_model(
    args: argparse.Namespace, performance: PerformanceSettings, device: torch.device, data: TrainingData
) -> tuple[Any, Any]:
    # fp16 keeps float32 weights under autocast; DeepSpeed keeps its own float32 copy
    mixed_fp16 = args.precision == "fp16" and not args.deepspeed_config
    dtype = torch.float32 if mixed_fp16 else DTYPES[args.precision]
    model = load_model(
        args.model,
        dtype,
        trust_remote_code=args.trust_remote_code,
        attn_implementation=args.attn_implementation,
        revision=args.revision,
    )
    model.config.use_cache = False
    frozen = apply_freezing(
        model,
        args.freeze_vision_tower,
        args.freeze_multimodal_projector,
        args.freeze_language_model,
        args.trainable_keywords,
    )
    expected_tokens = int(data.lengths.sum() * args.epochs) // int(os.environ.get("WORLD_SIZE", "1"))
    forward = build_forward(
        model,
        performance,
        device,
        training=True,
        expected_tokens=expected_tokens,
        compute_dtype=torch.float16 if mixed_fp16 else None,
    )
    return forward, frozen


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Values that every tracker takes."""
    return {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in config.items()
    }


def _tracker(accelerator: Any) -> Any:
    def log(entry: dict[str, Any]) -> None:
        numbers = {key: value for key, value in entry.items() if isinstance(value, (int, float))}
        accelerator.log({f"train/{key}": value for key, value in numbers.items()}, step=entry["step"])

    return log


def _write_results(
    args: argparse.Namespace, summary: dict[str, Any], fingerprint: dict[str, Any], ended: dict[str, Any]
) -> None:
    folder = args.output_dir
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    atomic_write_json(
        folder / output.RUN_RECORD_NAME, provenance() | {"arguments": plain, "fingerprint": fingerprint}
    )
    summary_name = f"train_summary_{args.arm}.json"
    atomic_write_json(folder / summary_name, summary)
    output.write_checkpoint_record(folder, args.arm, args.model, bool(args.save_final_model))
    names = [summary_name, STEP_LOG_NAME, output.RUN_RECORD_NAME, output.RECORD_NAME]
    keep_finished(folder, names, ended)
    remove_resume_points(folder)
    logger.info(
        "%s: %d samples in %d steps, %.1f samples/s, %.0f real tokens/s, mean loss %.4f, padding %.1f %%",
        args.arm,
        summary["emitted_samples"],
        summary["global_step"],
        summary["effective_emitted_samples_per_second"] or np.nan,
        summary["real_tokens_per_second"] or np.nan,
        summary["train_loss"],
        100 * (summary["padding_ratio"] or 0),
    )
