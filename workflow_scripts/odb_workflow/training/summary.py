"""``train_summary_ARM.json``: what a training was, how fast it went, and whether it saw each sample once."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ..runtime.provenance import command_line, git_state, now, package_versions
from .book import Totals, peak_memory_bytes, process_peak_bytes


def training_summary(
    args: argparse.Namespace,
    totals: Totals,
    *,
    ending: str,
    audit: dict[str, Any],
    split: dict[str, Any],
    world_size: int,
    device: torch.device,
    switches: dict[str, Any],
    startup_seconds: float,
    started: str,
    resumed_at_step: int | None,
    trained: dict[str, Any],
    code_version: int,
    over_budget_samples: int,
    deepspeed_stage: int | None,
    batch_size_search: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The fields of the summary, ready for JSON. Throughput is over wall-clock training time.

    Args:
        ending: ``finished`` or ``max_steps``.
        audit: of ``audit.summarize``.
        trained: which parameters were trained.
        batch_size_search: how ``--fixed-batch-size auto`` was found (``choose_batch_size``).
        over_budget_samples: samples longer than the token budget, each a batch of its own.
    """
    runtime = totals.runtime_seconds
    tokens = totals.real_tokens + totals.padded_tokens
    uses_budget = args.loader in ("odb", "token_budget")
    return {
        "arm": args.arm,
        "loader": args.loader,
        "ending": ending,
        "global_step": totals.step,
        "optimizer_steps": totals.step - totals.skipped_steps,
        "skipped_steps": totals.skipped_steps,
        "emitted_samples": totals.samples,
        "mean_emitted_samples_per_step": totals.samples / totals.step if totals.step else None,
        "effective_emitted_samples_per_second": totals.samples / runtime if runtime else None,
        "real_tokens_per_second": totals.real_tokens / runtime if runtime else None,
        "runtime_seconds": runtime,
        "startup_seconds": startup_seconds,
        "data_wait_seconds": totals.data_wait_seconds,
        "compile_seconds": totals.compile_seconds,
        "train_loss": totals.mean_loss,
        "world_size": world_size,
        "epochs": args.epochs,
        "split": split,
        "token_budget": args.token_budget if uses_budget else None,
        "buffer_size": args.buffer_size if args.loader == "odb" else None,
        "fixed_batch_size": None
        if uses_budget
        else (batch_size_search or {}).get("size", args.fixed_batch_size),
        "batch_size_search": batch_size_search,
        "over_budget_samples": over_budget_samples if uses_budget else None,
        "padding": args.padding,
        "loss_scaling": args.loss_scaling,
        "join": args.join if args.loader == "odb" else None,
        "no_warmup_buffer": args.no_warmup_buffer if args.loader == "odb" else None,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "real_tokens": totals.real_tokens,
        "padded_tokens": totals.padded_tokens,
        "padding_ratio": totals.padded_tokens / tokens if tokens else None,
        "label_tokens": totals.label_tokens,
        "samples_audit": audit,
        "lr": args.lr,
        "lr_scheduler": args.lr_scheduler,
        "warmup_ratio": args.warmup_ratio,
        "schedule_basis": args.schedule_basis,
        "max_grad_norm": args.max_grad_norm,
        "seed": args.seed,
        "precision": args.precision,
        "deepspeed_stage": deepspeed_stage,
        "optimizer_states": args.optimizer_states,
        "model": args.model,
        "trained": trained,
        "performance_switches": switches,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "peak_memory_bytes": process_peak_bytes(),
        "peak_memory_bytes_gpu": peak_memory_bytes(device) if device.type == "cuda" else None,
        "num_workers": args.num_workers,
        "prefetch_factor": args.prefetch_factor,
        "resumed_at_step": resumed_at_step,
        "versions": package_versions(),
        "git_commit": git_state()["commit"],
        "started": started,
        "ended": now(),
        "command": command_line(),
        "code_version": code_version,
    }
