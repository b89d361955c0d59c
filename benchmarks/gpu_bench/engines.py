"""The optimizer step of the engines: one process alone, and DeepSpeed ZeRO-2 with one process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from odb_workflow.model.forward import VLMForward, build_forward
from odb_workflow.runtime.files import atomic_write_json, read_json
from odb_workflow.training.engines import DeepSpeedEngine, OptimizerSettings, PlainEngine
from odb_workflow.training.setup import deepspeed_settings, make_accelerator
from odb_workflow.training.steps import Mover

from .steps import LEARNING_RATE, MAX_GRAD_NORM, Batch

ZERO_2 = Path(__file__).resolve().parent.parent.parent / "config" / "ds_z2.json"


class EngineStep:
    """Forward, backward and update as the training loop does them, with either engine.

    Args:
        zero: What differs from config/ds_z2.json in its ``zero_optimization``; None for the plain engine.
        folder: Where DeepSpeed's configuration is written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        performance: dict[str, Any],
        zero: dict[str, Any] | None,
        folder: Path,
    ) -> None:
        self.forward: VLMForward = build_forward(model, performance, device, training=True)
        fused = bool(self.forward.switches["fused_optimizer"])
        self.device, self.pixel_dtype = device, next(model.parameters()).dtype
        precision = "bf16" if self.pixel_dtype == torch.bfloat16 else "fp32"
        settings = OptimizerSettings(0.0, MAX_GRAD_NORM, precision, fused)
        self.mover = Mover(device, bool(self.forward.switches["pinned_batches"]))
        if zero is None:
            self.engine: Any = PlainEngine(self.forward, device, 1, settings)
        else:
            config = read_json(ZERO_2)
            config["zero_optimization"].update(zero)
            path = folder / "deepspeed.json"
            atomic_write_json(path, config)
            args = argparse.Namespace(
                deepspeed_config=str(path),
                gradient_accumulation_steps=1,
                max_grad_norm=MAX_GRAD_NORM,
                precision=precision,
                log_with=None,
            )
            accelerator = make_accelerator(args, deepspeed_settings(args), device.type == "cpu")
            self.engine = DeepSpeedEngine(self.forward, accelerator, settings)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Train on a batch that lies on the host; returns the summed loss."""
        labels = int(batch["label_counts"].sum())
        loss = self.engine.accumulate(self.mover(batch), 1.0 / labels, True)
        self.engine.step(LEARNING_RATE)
        return loss

    def parts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Mean milliseconds of forward with backward and of the update, each waited for."""
        spent = {"forward_backward_ms": 0.0, "update_ms": 0.0}
        for batch in batches:
            labels = int(batch["label_counts"].sum())
            moved = self.mover(batch)
            self._wait()
            began = time.perf_counter()
            self.engine.accumulate(moved, 1.0 / labels, True)
            self._wait()
            between = time.perf_counter()
            self.engine.step(LEARNING_RATE)
            self._wait()
            spent["forward_backward_ms"] += (between - began) * 1e3
            spent["update_ms"] += (time.perf_counter() - between) * 1e3
        return {name: total / len(batches) for name, total in spent.items()}

    def close(self) -> None:
        """Free optimizer and gradients."""
        for parameter in self.forward.parameters():
            parameter.grad = None
        self.engine = None
        AcceleratorState._reset_state()  # accelerate takes one DeepSpeed configuration per process

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
