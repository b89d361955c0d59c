"""Training steps: the published form and ours, timed on batches whose shapes were not seen before."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from odb_workflow.loaders.collate import Collator
from odb_workflow.model import compat
from odb_workflow.model.forward import VLMForward, build_forward
from odb_workflow.training.engines import OptimizerSettings, PlainEngine
from odb_workflow.training.steps import Mover

from .mix import PixelPool, Shape, make_sample

Batch = dict[str, Any]
LEARNING_RATE = 1e-7  # small: the weights are random, and every variant should find them alike
MAX_GRAD_NORM = 4.0
MODEL_INPUTS = (
    "input_ids",
    "attention_mask",
    "labels",
    "mm_token_type_ids",
    "pixel_values",
    "image_grid_thw",
)


class Step(Protocol):
    """One training step of a kind."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Train on a batch that lies on the host; returns the mean loss."""

    def close(self) -> None:
        """Free the optimizer."""


class PublishedStep:
    """The published example's step: ``model(**batch).loss`` under bf16 autocast with gradient checkpointing
    and attention mask, SDPA as torch chooses it, AdamW as torch chooses it, a loss that is read every step.
    """

    pixel_dtype = torch.float32

    def __init__(self, model: torch.nn.Module, device: torch.device, autocast: bool = True) -> None:
        self.autocast = autocast and device.type == "cuda"
        build_forward(model, {"mode": "reference", "checkpointing": "on"}, device, training=True)
        self.model, self.device = model, device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean loss with graph of a batch on the host."""
        inputs = {name: batch[name].to(self.device) for name in MODEL_INPUTS if name in batch}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return self.model(**inputs, use_cache=False).loss

    def __call__(self, batch: Batch) -> torch.Tensor:
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        gathered = torch.stack([loss.detach()])  # one process: the gather is a copy
        gathered.mean().item()
        return loss.detach()

    def close(self) -> None:
        self.optimizer.zero_grad()
        compat.set_checkpointing(self.model, False)
        del self.optimizer, self.schedule


class OurStep:
    """The project's forward and engine, as ``train_accelerate.py`` uses them.

    Args:
        sixteen_bit_states: Update the bf16 weights themselves, as the published form does, in place of the
            engine's float32 copy (8 bytes a parameter less).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        performance: dict[str, Any],
        sixteen_bit_states: bool = False,
    ) -> None:
        self.forward: VLMForward = build_forward(model, performance, device, training=True)
        self.fused = bool(self.forward.switches["fused_optimizer"])
        self.mover = Mover(device, bool(self.forward.switches["pinned_batches"]))
        self.pixel_dtype = next(model.parameters()).dtype
        self.engine = None
        if sixteen_bit_states:
            self.parameters = [p for p in model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(
                self.parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=self.fused or None
            )
        else:
            settings = OptimizerSettings(0.0, MAX_GRAD_NORM, "bf16", self.fused)
            self.engine = PlainEngine(self.forward, device, 1, settings)
        self.moved: tuple[int, Batch] | None = None

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean loss with graph of a batch on the host."""
        return self.forward(self._on_device(batch)) / int(batch["label_counts"].sum())

    def prefetch(self, batch: Batch) -> None:
        """Start to copy the next batch."""
        self.moved = (id(batch), self.mover(batch))

    def __call__(self, batch: Batch) -> torch.Tensor:
        labels = int(batch["label_counts"].sum())
        moved = self._on_device(batch)
        if self.engine is not None:
            loss = self.engine.accumulate(moved, 1.0 / labels, True) / labels
            self.engine.step(LEARNING_RATE)
            return loss
        loss = self.forward(moved) / labels
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _on_device(self, batch: Batch) -> Batch:
        if self.moved is not None and self.moved[0] == id(batch):
            moved = self.moved[1]
            self.moved = None
            return moved
        return self.mover(batch)

    def close(self) -> None:
        for parameter in self.forward.parameters():
            parameter.grad = None
        self.moved = self.engine = self.optimizer = None


class BatchMaker:
    """Batches of given shapes, made in threads before the clock starts."""

    def __init__(self, config: Any, pool: PixelPool, pinned: bool) -> None:
        self.config, self.pool, self.pinned = config, pool, pinned
        self.ids = {
            name: getattr(config, name)
            for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id")
        }

    def samples(self, shapes: Sequence[Shape], rows: Sequence[int]) -> list[dict[str, Any]]:
        """Samples of ``rows``."""
        return [make_sample(row, shapes[row], self.pool, self.ids) for row in rows]

    def __call__(
        self,
        shapes: Sequence[Shape],
        groups: Sequence[Sequence[int]],
        padding: str,
        pixel_dtype: torch.dtype,
    ) -> list[Batch]:
        """One batch a group."""
        collator = Collator.from_config(
            self.config, self.config.text_config.pad_token_id, padding, pixel_dtype=pixel_dtype
        )

        def make(group: Sequence[int]) -> Batch:
            batch = collator(self.samples(shapes, group))
            if self.pinned and pixel_dtype != torch.float32:  # the published form copies from pageable memory
                return {k: v.pin_memory() if torch.is_tensor(v) else v for k, v in batch.items()}
            return batch

        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(make, groups))


def measure(step: Step, batches: Sequence[Batch], warm: int, device: torch.device) -> dict[str, Any]:
    """Train on ``batches``; the first ``warm`` are not counted.

    Returns:
        Times, tokens, memory and loss of the counted ones.
    """
    cuda = device.type == "cuda"
    prefetch: Callable[[Batch], None] = getattr(step, "prefetch", lambda batch: None)
    for batch in batches[:warm]:
        step(batch)
    counted = batches[warm:]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(counted) + 1)] if cuda else []
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    if cuda:
        marks[0].record()
    for number, batch in enumerate(counted):
        loss = step(batch)
        if number + 1 < len(counted):
            prefetch(counted[number + 1])
        if cuda:
            marks[number + 1].record()
    loss = float(loss)
    seconds = time.perf_counter() - began
    spans = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) if cuda else []
    real = sum(int(batch["lengths"].sum()) for batch in counted)
    total = sum(batch["input_ids"].numel() for batch in counted)
    samples = sum(len(batch["lengths"]) for batch in counted)
    return {
        "steps": len(counted),
        "seconds": seconds,
        "step_ms": seconds / len(counted) * 1e3,
        "median_step_ms": spans[len(spans) // 2] if spans else None,
        "slowest_step_ms": spans[-1] if spans else None,
        "samples_per_second": samples / seconds,
        "real_tokens_per_second": real / seconds,
        "samples_per_step": samples / len(counted),
        "padding_ratio": 1 - real / total,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "loss": loss,
    }


def gradient_norm(step: Step, batch: Batch, model: torch.nn.Module) -> tuple[float, float]:
    """Mean loss and gradient norm (float64 over float32 squares) of one batch, without an update."""
    for parameter in model.parameters():
        parameter.grad = None
    loss = step.loss(batch)
    loss.backward()
    squares = [p.grad.float().square().sum().double() for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return float(loss.detach()), float(torch.stack(squares).sum().sqrt())


def busy_share(step: Step, batches: Sequence[Batch]) -> dict[str, float]:
    """Share of the wall time in which at least one kernel ran, and the kernels that took most of it."""
    from torch.profiler import ProfilerActivity, profile

    step(batches[0])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        for batch in batches[1:]:
            step(batch)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reached = 0.0, 0.0
    groups = {"matrix products": 0.0, "attention": 0.0, "other": 0.0}
    for start, end, name in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        lowered = name.lower()
        if any(part in lowered for part in ("flash", "fmha", "attention")):
            groups["attention"] += end - start
        elif any(part in lowered for part in ("gemm", "nvjet", "cutlass", "matmul")):
            groups["matrix products"] += end - start
        else:
            groups["other"] += end - start
    total = seconds * 1e6
    return {"busy_share": busy / total, **{f"{name} share": spent / total for name, spent in groups.items()}}
