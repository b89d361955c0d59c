"""Forward, backward and optimizer step, without and with DeepSpeed, behind one small interface.

``accumulate`` adds the gradient of one micro-batch; ``step`` clips, updates and clears. Both leave their
numbers on the device, so that the loop decides when to wait for it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ..runtime.errors import UserError


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and what surrounds it."""

    weight_decay: float
    max_grad_norm: float
    precision: str
    fused: bool
    sixteen_bit_states: bool = False


class Engine(Protocol):
    """What the training loop needs of an engine."""

    skipped_steps: int

    def accumulate(self, batch: dict[str, Any], factor: float, last: bool) -> torch.Tensor:
        """Backward of ``factor`` times the summed loss; returns the summed loss, detached, on the device.

        ``last``: whether the optimizer step follows, so that ranks exchange gradients.
        """

    def step(self, rate: float) -> torch.Tensor | float:
        """Clip, update with this learning rate, clear; returns the gradient norm before clipping."""

    def rehearse(self, batch: dict[str, Any]) -> None:
        """Forward and backward of this rank alone; the gradients are thrown away."""

    def pending_bytes(self) -> int:
        """Bytes on the device that the first steps allocate for good (optimizer states, buckets)."""

    def save(self, folder: Path, is_main: bool) -> None:
        """Write weights and optimizer state for a resume; called on all ranks."""

    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote."""


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters with gradient, by name; a tied one appears once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def parameter_groups(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, norms and biases without."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _throw_gradients_away(loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> None:
    # autograd.grad reaches no parameter's .grad and no hook that would wait for other ranks
    torch.autograd.grad(loss, list(parameters), allow_unused=True)


def _missing_moments(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of Adam's two moments that are not allocated yet."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(2 * p.numel() * p.element_size() for p in parameters if not optimizer.state.get(p))


def _without_buffer_broadcast() -> dict[str, bool]:
    """Buffers are constants here; the switch was renamed in torch 2.14."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


class PlainEngine:
    """One process, or DDP over several.

    16-bit weights keep a float32 copy that the optimizer works on: at a learning rate of 1e-5 most updates
    are smaller than the rounding of bfloat16 and would be lost. fp16 trains float32 weights under autocast
    with a gradient scaler.
    """

    def __init__(
        self, forward: torch.nn.Module, device: torch.device, world_size: int, settings: OptimizerSettings
    ) -> None:
        self.forward, self.settings = forward, settings
        self.skipped_steps = 0
        self._parameters = trainable(forward)
        low = {name: p for name, p in self._parameters.items() if p.dtype in (torch.bfloat16, torch.float16)}
        self._masters = {} if settings.sixteen_bit_states else {n: p.detach().float() for n, p in low.items()}
        updated = [self._masters.get(name, p) for name, p in self._parameters.items()]
        self.optimizer = torch.optim.AdamW(
            parameter_groups(updated, settings.weight_decay), lr=0.0, fused=settings.fused or None
        )
        self._updated = updated
        fp16 = settings.precision == "fp16"
        self._scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        self._autocast = (
            torch.autocast(device.type, dtype=torch.float16) if fp16 else contextlib.nullcontext()
        )
        # No device_ids: DDP would copy host-side metadata of a batch to the GPU.
        self._module = (
            DistributedDataParallel(forward, gradient_as_bucket_view=True, **_without_buffer_broadcast())
            if world_size > 1
            else forward
        )

    def accumulate(self, batch: dict[str, Any], factor: float, last: bool) -> torch.Tensor:
        alone = not last and isinstance(self._module, DistributedDataParallel)
        with self._module.no_sync() if alone else contextlib.nullcontext():
            with self._autocast:
                loss = self._module(batch)
            self._scaler.scale(loss * factor).backward()
        return loss.detach()

    def rehearse(self, batch: dict[str, Any]) -> None:
        with self._autocast:
            loss = self.forward(batch)
        _throw_gradients_away(loss, self._parameters.values())

    def pending_bytes(self) -> int:
        return _missing_moments(self.optimizer)

    def step(self, rate: float) -> torch.Tensor:
        for name, master in self._masters.items():
            gradient = self._parameters[name].grad
            master.grad = None if gradient is None else gradient.float()
        self._scaler.unscale_(self.optimizer)
        limit = self.settings.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._updated, limit)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        before = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self._scaler.is_enabled() and self._scaler.get_scale() < before:
            self.skipped_steps += 1
        if self._masters:
            with torch.no_grad():
                names = list(self._masters)
                torch._foreach_copy_([self._parameters[n] for n in names], [self._masters[n] for n in names])
            for master in self._masters.values():
                master.grad = None
        for parameter in self._parameters.values():
            parameter.grad = None
        return norm

    def save(self, folder: Path, is_main: bool) -> None:
        if is_main:
            weights = {name: self._masters.get(name, p).detach() for name, p in self._parameters.items()}
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": self._scaler.state_dict(),
                "weights": weights,
            }
            torch.save(state, folder / "engine.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "engine.pt", map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, weight in state["weights"].items():
                if name in self._masters:
                    self._masters[name].copy_(weight)
                self._parameters[name].copy_(weight)
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])


class DeepSpeedEngine:
    """ZeRO stage 0, 1 or 2 through accelerate."""

    def __init__(self, forward: torch.nn.Module, accelerator: Any, settings: OptimizerSettings) -> None:
        self.forward, self.settings = forward, settings
        self.skipped_steps = 0
        optimizer = torch.optim.AdamW(
            parameter_groups(trainable(forward).values(), settings.weight_decay),
            lr=1e-8,  # set before every step; DeepSpeed refuses 0
            fused=settings.fused or None,
        )
        self._engine, wrapped = accelerator.prepare(forward, optimizer)
        self.optimizer = wrapped

    def accumulate(self, batch: dict[str, Any], factor: float, last: bool) -> torch.Tensor:
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        loss = self._engine(batch)
        # the engine would divide by the configured accumulation steps; our factor holds the real number
        self._engine.backward(loss * factor, scale_wrt_gas=False)
        return loss.detach()

    def rehearse(self, batch: dict[str, Any]) -> None:
        _throw_gradients_away(self.forward(batch), trainable(self.forward).values())

    def pending_bytes(self) -> int:
        zero = self._engine.optimizer
        elements = getattr(zero, "reduce_bucket_size", 0) * (2 if getattr(zero, "overlap_comm", False) else 1)
        trained = list(trainable(self.forward).values())
        bucket = min(elements, 2 * sum(p.numel() for p in trained)) * trained[0].element_size()
        return bucket + _missing_moments(getattr(zero, "optimizer", zero))

    def step(self, rate: float) -> torch.Tensor | float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        self.skipped_steps = int(self._engine.skipped_steps)
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else norm

    def save(self, folder: Path, is_main: bool) -> None:
        self._engine.save_checkpoint(str(folder), tag="engine", exclude_frozen_parameters=True)

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(
            str(folder), tag="engine", load_module_strict=False, load_lr_scheduler_states=False
        )
        if path is None:
            raise UserError(
                "the resume point cannot be read by DeepSpeed", where=str(folder), fix="delete it"
            )
