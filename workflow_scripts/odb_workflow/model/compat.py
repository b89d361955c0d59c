"""The one room for differences between the supported versions of torch and transformers.

Read and run: torch 2.11 and 2.14, transformers 5.17 and 5.24. What the fast forward uses of transformers is
public (attention interfaces, sub-modules of Qwen3-VL, ``vision_utils``) and equal in both.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.errors import UserError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of torch without it: one call per sample serves instead
    varlen_attn = None

logger = logging.getLogger(__name__)

# torch 2.14 refuses grouped heads unless told; 2.11 takes them as they come and has no such argument.
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True}
    if varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
    else {}
)

RECOMPILE_LIMIT = 64
TORCH_SUPPORTED = ((2, 11), (2, 14))
TRANSFORMERS_SUPPORTED = ((5, 17), (5, 24))


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version text such as ``2.14.1+cu130``."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()) or 0)


def check_versions() -> None:
    """Refuse versions older than the supported ones; say so for newer ones.

    Raises:
        UserError: torch or transformers is older than what the forward was read and tested against.
    """
    import transformers

    for name, version, (oldest, newest) in (
        ("torch", torch.__version__, TORCH_SUPPORTED),
        ("transformers", transformers.__version__, TRANSFORMERS_SUPPORTED),
    ):
        found = release(version)
        if found < oldest:
            raise UserError(
                f"{name} {version} is older than {oldest[0]}.{oldest[1]}, the oldest version supported",
                fix=f"install {name} {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}",
            )
        if found > newest:
            logger.warning("%s %s is newer than %d.%d, the newest version tested", name, version, *newest)


def is_qwen3_vl(model: torch.nn.Module) -> bool:
    """Whether ``model`` is the dense Qwen3-VL with the parts that the fast forward calls by name."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "qwen3_vl":
        return False
    inner = getattr(model, "model", None)
    return all(hasattr(inner, part) for part in ("visual", "language_model")) and hasattr(model, "lm_head")


def has_varlen_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one attention call can serve segments of different lengths (CUDA, 16-bit, Ampere or newer)."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and varlen_attn is not None
    )


def is_varlen_type(tensor: torch.Tensor) -> bool:
    """Whether :func:`varlen_attention` takes this tensor; cheap, and can be traced by the compiler."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and varlen_attn is not None


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention within each segment, in one kernel.

    Args:
        query: [T, heads, D]; ``key`` and ``value`` [T, key heads, D] with heads a multiple of key heads.
        cu_seqlens: int32 [N+1] segment boundaries on the device; ``max_seqlen`` the longest segment.

    Returns:
        [T, heads, D].
    """
    # Under autocast the rotary embedding leaves query and key in float32, and the kernel takes one type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
        **(GROUPED_HEADS if query.shape[1] != key.shape[1] else {}),
    )


def set_cudnn_attention(enabled: bool) -> None:
    """Allow or forbid cuDNN attention in this process.

    cuDNN builds a plan for every new shape (40-800 ms each on an H200), and with dynamic batches every
    shape is new. torch 2.14 also picks cuDNN inside ``varlen_attn``, out of reach of the public switch.
    """
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    if varlen_attn is None:
        return
    from torch.nn.attention import varlen

    chooser = getattr(varlen, "_should_use_cudnn", None)
    if chooser is None:
        return
    original = getattr(chooser, "original", chooser)
    if enabled:
        varlen._should_use_cudnn = original
    else:

        def never(device_index: int) -> bool:
            return False

        never.original = original
        varlen._should_use_cudnn = never


def compile_layer(layer: torch.nn.Module, eager_rounding: bool) -> None:
    """``torch.compile`` of one layer for shapes that vary.

    The compiler bounds some sizes (one graph for up to 2,559 tokens, another above, seen with torch 2.11), so
    that batches of very different sizes need several graphs; at torch's limit of 8 a layer would run
    uncompiled for the rest of the process.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    layer.compile(dynamic=True, options={"emulate_precision_casts": True} if eager_rounding else None)


def compile_seconds() -> float:
    """Seconds that this process has spent compiling, forward and backward (torch counts them privately)."""
    compiler = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds, and nothing may compile
    spent = getattr(compiler, "cumulative_time_spent_ns", {})
    return sum(spent.get(f"entire_{phase}_compile", 0) for phase in ("frame", "backward")) / 1e9


def set_checkpointing(model: torch.nn.Module, enabled: bool) -> None:
    """Turn transformers' own gradient checkpointing on or off (the methods were renamed after 5.17)."""

    def method(switch: str) -> Callable[..., None]:
        return getattr(model, f"activation_checkpointing_{switch}", None) or getattr(
            model, f"gradient_checkpointing_{switch}"
        )

    if enabled:
        method("enable")({"use_reentrant": False})
    elif any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        method("disable")()


def vision_rotary(visual: torch.nn.Module) -> torch.nn.Module:
    """The vision tower's rotary module (the name changed on transformers' main branch)."""
    return visual.rotary_pos_emb if hasattr(visual, "rotary_pos_emb") else visual.rotary_emb
