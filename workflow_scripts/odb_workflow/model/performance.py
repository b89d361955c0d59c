"""The named speed switches of ``performance:``; ``auto`` by default, ``reference`` for the plain forward."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..runtime.errors import UserError

if TYPE_CHECKING:  # the configuration is checked without torch, whose import takes seconds
    import torch

Switch = bool | Literal["auto"]

CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("auto", "reference"),
    "attention": ("auto", "varlen", "sdpa"),
    "vision": ("auto", "varlen", "sdpa"),
    "loss_head": ("auto", "chunked", "full"),
    "checkpointing": ("auto", "off", "on"),
}


@dataclass(frozen=True)
class PerformanceSettings:
    """How a forward pass is computed. No switch changes what is computed.

    Attributes:
        mode: ``auto`` uses the fast forward for Qwen3-VL; ``reference`` is the plain transformers forward.
        attention: Language model. ``varlen`` serves packed rows in one kernel (CUDA, 16-bit);
            ``sdpa`` calls ``scaled_dot_product_attention`` per sample.
        vision: Attention of the vision tower: ``varlen`` all images in one kernel, ``sdpa`` per run of
            images of one size.
        host_positions: mRoPE positions and vision tables from the collator, not from the GPU.
        no_mask: Padded batches without an attention mask: right padding cannot reach a real token.
        loss_head: ``chunked`` computes logits on label tokens only, a chunk at a time; ``full`` on all
            tokens.
        loss_chunk_tokens: Label tokens per chunk; 0 chooses.
        compile_layers: ``torch.compile`` of each layer with dynamic shapes; ``auto`` only where it repays.
        eager_rounding: Compiled layers round to 16 bit between fused operations, as the plain forward does.
            Without it they are nearer to float32 than the plain forward, and a little apart from it.
        linear_patch_embedding: The patch embedding as a matrix product in place of Conv3d.
        frozen_vision_without_graph: No autograd graph through a vision tower that is frozen.
        checkpointing: Recompute activations in the backward pass: ``off``, ``on`` (every layer), a number k
            (every k-th layer), or ``auto`` (as many layers as the free GPU memory demands).
        cudnn_attention: Let torch choose cuDNN attention; ``auto`` forbids it.
        fused_optimizer: One fused AdamW kernel (for the training loop).
        pinned_batches: Page-locked batches copied ahead of compute (for the training loop).
        bf16_pixels: Pixels travel as bfloat16 when the model computes in it (for the collator).
    """

    mode: Literal["auto", "reference"] = "auto"
    attention: Literal["auto", "varlen", "sdpa"] = "auto"
    vision: Literal["auto", "varlen", "sdpa"] = "auto"
    host_positions: Switch = "auto"
    no_mask: Switch = "auto"
    loss_head: Literal["auto", "chunked", "full"] = "auto"
    loss_chunk_tokens: int = 0
    compile_layers: Switch = "auto"
    eager_rounding: Switch = "auto"
    linear_patch_embedding: Switch = "auto"
    frozen_vision_without_graph: Switch = "auto"
    checkpointing: Literal["auto", "off", "on"] | int = "auto"
    cudnn_attention: Switch = "auto"
    fused_optimizer: Switch = "auto"
    pinned_batches: Switch = "auto"
    bf16_pixels: Switch = "auto"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name))

    @classmethod
    def parse(cls, value: PerformanceSettings | Mapping[str, Any] | str | None) -> PerformanceSettings:
        """From ``auto``, ``reference``, a mapping of switches, or either as JSON text.

        Raises:
            UserError: an unknown switch or a value it does not take.
        """
        if isinstance(value, PerformanceSettings):
            return value
        if isinstance(value, str) and value not in ("", "auto", "reference"):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"performance is {value!r}, which is neither auto, reference nor JSON ({error.msg})",
                    where="performance",
                    fix='write auto, reference, or switches such as {"compile_layers": false}',
                ) from None
        if value in (None, "", "auto"):
            return cls()
        if value == "reference":
            return cls(mode="reference")
        if not isinstance(value, Mapping):
            raise UserError(
                f"performance is {value!r}", where="performance", fix="write auto, reference or switches"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        for name in value:
            if name not in known:
                raise UserError(
                    f"unknown switch {name!r}",
                    where=f"performance.{name}",
                    fix=f"known: {', '.join(sorted(known))}",
                )
        return cls(**value)

    def with_checkpointing(self, choice: str | bool | int) -> PerformanceSettings:
        """These settings with the choice of ``--gradient-checkpointing`` (auto, on, off)."""
        if isinstance(choice, bool):
            choice = "on" if choice else "off"
        return dataclasses.replace(self, checkpointing=choice)

    def on(self, name: str, default: bool) -> bool:
        """A switch of true, false or auto, with ``default`` for auto."""
        value = getattr(self, name)
        return default if value == "auto" else bool(value)

    def pixel_dtype(self, precision: str) -> torch.dtype | None:
        """Type in which pixels travel: bfloat16 where the model (``bf16``) rounds them to it anyway; None
        keeps the processor's float32.
        """
        import torch

        return torch.bfloat16 if precision == "bf16" and self.on("bf16_pixels", True) else None


def _check(name: str, value: Any) -> None:
    where = f"performance.{name}"
    if name == "loss_chunk_tokens":
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(
                f"{name} is {value!r}", where=where, fix="a number of tokens, 0 to choose by itself"
            )
        return
    if name in CHOICES:
        is_interval = (
            name == "checkpointing" and isinstance(value, int) and not isinstance(value, bool) and value >= 1
        )
        if value not in CHOICES[name] and not is_interval:
            extra = " or a number k >= 1 (every k-th layer)" if name == "checkpointing" else ""
            raise UserError(
                f"{name} is {value!r}", where=where, fix=f"one of {', '.join(CHOICES[name])}{extra}"
            )
        return
    if not (isinstance(value, bool) or value == "auto"):
        raise UserError(f"{name} is {value!r}", where=where, fix="one of auto, true, false")
