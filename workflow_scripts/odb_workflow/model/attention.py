"""Attention of the fast forward, registered with transformers under names of its own.

Both functions are reached through ``AttentionInterface``. Called by a plain transformers forward, without the
keyword arguments that only the fast forward sends, :func:`text_attention` does what ``sdpa`` does, so that a
model prepared for the fast forward still answers a plain call correctly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import compat

TEXT_ATTENTION = "odb_text"
# transformers sends a whole batch of images in one call, with boundaries, to names that contain "flash".
VISION_ATTENTION = "odb_flash_segments"


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention within each segment by ``scaled_dot_product_attention``, one call per run of equal lengths.

    Args:
        query: [1, heads, T, D]; ``key`` and ``value`` [1, key heads, T, D].
        lengths: Tokens of each segment, T in all.

    Returns:
        [1, T, heads, D].
    """
    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
    # split, not slices: the gradient of a slice is a buffer of the whole length, once for each run.
    sizes = [length * count for length, count in runs]
    parts = zip(*(tensor[0].split(sizes, dim=1) for tensor in (query, key, value)), strict=True)
    outputs = []
    for (length, count), part in zip(runs, parts, strict=True):
        rows = [tensor.unflatten(1, (count, length)).transpose(0, 1) for tensor in part]
        result = F.scaled_dot_product_attention(
            *rows, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(result.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def text_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    segment_cu_seqlens: torch.Tensor | None = None,
    segment_max_seqlen: int | None = None,
    segment_lengths: Sequence[int] | None = None,
    causal_rows: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the language model, [B, heads, L, D] -> [B, L, heads, D].

    ``segment_cu_seqlens`` with ``segment_max_seqlen``: packed row in one kernel. ``segment_lengths``:
    packed row, one call per run of equal lengths. ``causal_rows``: padded rows without a mask. None of
    them: plain ``sdpa``.
    """
    if segment_cu_seqlens is not None:
        output = compat.varlen_attention(
            query.transpose(1, 2)[0], key.transpose(1, 2)[0], value.transpose(1, 2)[0],
            segment_cu_seqlens, segment_max_seqlen, causal=True, scale=scaling,
        )  # fmt: skip
        return output[None], None
    if segment_lengths is not None:
        return segment_attention(query, key, value, segment_lengths, True, scaling), None
    if causal_rows:
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output.transpose(1, 2), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def vision_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    segment_lengths: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Full attention within each image, [1, heads, P, D] -> [1, P, heads, D]; see :func:`text_attention`."""
    if segment_lengths is None and compat.is_varlen_type(value):
        output = compat.varlen_attention(
            query.transpose(1, 2)[0], key.transpose(1, 2)[0], value.transpose(1, 2)[0],
            cu_seq_lens_q, max_length_q, causal=False, scale=scaling,
        )  # fmt: skip
        return output[None], None
    if segment_lengths is None:
        segment_lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    return segment_attention(query, key, value, segment_lengths, False, scaling), None


def register() -> None:
    """Make both functions known to transformers; safe to call again."""
    AttentionInterface.register(TEXT_ATTENTION, text_attention)
    AttentionInterface.register(VISION_ATTENTION, vision_attention)
