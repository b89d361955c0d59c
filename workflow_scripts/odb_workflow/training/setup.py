"""Device, ranks and accelerator; everything that must be refused before work begins."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

from ..runtime.errors import UserError
from ..runtime.files import dump_json, read_json
from .agreement import AllRanksError, Ranks


def use_cpu(args: argparse.Namespace) -> bool:
    """Whether to train on the CPU.

    Raises:
        UserError: 16-bit precision is asked for and there is no GPU.
    """
    asked = args.cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    cpu = asked or not torch.cuda.is_available()
    if cpu and args.precision == "fp16":
        raise UserError("precision fp16 needs a GPU", where="--precision", fix="use fp32")
    if cpu and not asked and args.precision == "bf16":
        raise UserError(
            "precision bf16 asks for a GPU, and torch sees none",
            where="--precision",
            fix="check nvidia-smi and CUDA_VISIBLE_DEVICES; on a CPU use --precision fp32 "
            "(or --cpu to insist)",
        )
    return cpu


def deepspeed_settings(args: argparse.Namespace) -> dict[str, Any] | None:
    """The DeepSpeed configuration of this run, every value explicit; None without DeepSpeed.

    Raises:
        UserError: ZeRO-3, an optimizer or a scheduler in the file, or no such file.
    """
    if not args.deepspeed_config:
        return None
    path = Path(args.deepspeed_config)
    if not path.is_file():
        raise UserError("DeepSpeed configuration not found", where=str(path), fix="give config/ds_z2.json")
    config = read_json(path)
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2):
        raise UserError(
            f"ZeRO stage {stage} is not supported",
            where=f"{path}: zero_optimization.stage",
            fix="use stage 2 (config/ds_z2.json): the forward pass reads whole weights, "
            "which stage 3 scatters",
        )
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise UserError(
                f"{key} belongs to the training, not to the DeepSpeed configuration",
                where=f"{path}: {key}",
                fix="remove it; --lr, --weight-decay and --lr-scheduler set it",
            )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config.update(
        {
            # batches differ in size: these only have to agree with each other
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "train_batch_size": args.gradient_accumulation_steps * world,
            # DeepSpeed clips at 1.0 unless told otherwise; 0 never clips
            "gradient_clipping": args.max_grad_norm,
            "bf16": {**_block(config, "bf16"), "enabled": args.precision == "bf16"},
            "fp16": {**_block(config, "fp16"), "enabled": args.precision == "fp16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000_000,
        }
    )
    return config


def _block(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.get(name, {}).items() if value != "auto"}


def make_accelerator(args: argparse.Namespace, deepspeed: dict[str, Any] | None, cpu: bool) -> Accelerator:
    """Start the process group and choose the device.

    Raises:
        UserError: the rendezvous port is taken, or DeepSpeed cannot be used here.
    """
    trackers: dict[str, Any] = {}
    if args.log_with:
        trackers = {"log_with": args.log_with, "project_dir": str(args.output_dir / "trackers")}
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with _rendezvous_errors():
        if deepspeed is None:
            return Accelerator(cpu=cpu, mixed_precision="no", **trackers)
        for key, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
        ):
            os.environ.setdefault(key, value)
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        if cpu:  # accelerate would drop the DeepSpeed plugin without a word where this variable is set
            os.environ.pop("ACCELERATE_USE_CPU", None)
        try:
            plugin = DeepSpeedPlugin(hf_ds_config=deepspeed)
        except ImportError as error:
            raise UserError(f"DeepSpeed cannot be used: {error}", where="--deepspeed-config") from error
        handlers = [InitProcessGroupKwargs(backend="gloo")] if cpu else []
        precision = "no" if args.precision == "fp32" else args.precision
        return Accelerator(
            deepspeed_plugin=plugin, mixed_precision=precision, kwargs_handlers=handlers, **trackers
        )


@contextlib.contextmanager
def _rendezvous_errors() -> Any:
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "EADDRINUSE" in text or "already in use" in text:
            raise UserError(
                f"the rendezvous port {os.environ.get('MASTER_PORT', '?')} is taken by another process",
                where="MASTER_PORT",
                fix="give another port: accelerate launch --main_process_port N (ODB_MM_MIX_MASTER_PORT)",
            ) from error
        raise


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_equal_on_ranks(ranks: Ranks, what: dict[str, Any]) -> None:
    """Stop all ranks where they were started with different settings or see different data.

    Raises:
        UserError: on all ranks; lists each key that differs.
    """
    everyone = ranks.gather_objects(what)
    lines = []
    for key in what:
        values = [dump_json(one.get(key)) for one in everyone]
        if len(set(values)) > 1:
            lines.append(
                f"- {key}: " + ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            )
    if lines:
        raise AllRanksError(
            "\n".join(["the ranks were started with different settings:", *lines]),
            fix="start all ranks by one launcher with one command line",
        )
