"""Positions and attention segments of a batch, computed on the host before the batch is sent to the device.

The transformers forward derives all of this from tensors on the GPU, and waits for the GPU each time. The
values here are the same: :func:`mrope_positions` follows ``Qwen3VLModel.get_rope_index`` and the vision
tables come from ``transformers.vision_utils`` itself (read in transformers 5.17 and 5.24).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

TEXT_TOKEN, IMAGE_TOKEN = 0, 1


def mrope_positions(
    token_types: np.ndarray, grids: Sequence[Sequence[int]], spatial_merge_size: int
) -> np.ndarray:
    """Multimodal rotary positions (time, height, width) of one sample.

    Text advances all three axes together; an image of ``h x w`` merged patches gets its grid coordinates and
    advances the text by ``max(h, w)``.

    Args:
        token_types: int array [L], 0 text and 1 image.
        grids: (t, h, w) in patches of each image, in order.
        spatial_merge_size: patches per side that become one token.

    Returns:
        int64 array [3, L].

    Raises:
        ValueError: the runs of image tokens do not fit the grids.
    """
    length = len(token_types)
    starts = np.flatnonzero(np.diff(token_types, prepend=-1)) if length else np.zeros(0, dtype=np.int64)
    ends = np.append(starts[1:], length)
    positions = np.empty((3, length), dtype=np.int64)
    remaining = iter(grids)
    current = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if token_types[start] == TEXT_TOKEN:
            positions[:, start:end] = np.arange(current, current + end - start)
            current += end - start
            continue
        grid = next(remaining, None)
        if grid is None:
            raise ValueError(f"more runs of image tokens than images ({len(grids)})")
        frames, height, width = (
            int(grid[0]),
            int(grid[1]) // spatial_merge_size,
            int(grid[2]) // spatial_merge_size,
        )
        if frames * height * width != end - start:
            raise ValueError(
                f"{end - start} image tokens in a row, but the image's grid {tuple(map(int, grid))} "
                f"gives {frames * height * width}"
            )
        positions[:, start:end] = np.indices((frames, height, width)).reshape(3, -1) + current
        current += max(height, width)
    if next(remaining, None) is not None:
        raise ValueError(f"fewer runs of image tokens than images ({len(grids)})")
    return positions


def vision_segment_lengths(image_grid_thw: torch.Tensor) -> tuple[int, ...]:
    """Patches of each attention segment (one a frame) of the images; ``image_grid_thw`` [n, 3]."""
    return tuple(h * w for t, h, w in image_grid_thw.tolist() for _ in range(t))


def vision_tables(
    image_grid_thw: torch.Tensor, grid_side: int | None, spatial_merge_size: int
) -> dict[str, Any]:
    """What the vision tower needs to know of the images' shapes, for P patches in S segments.

    Args:
        image_grid_thw: int64 [n, 3] on the host.
        grid_side: side of the learned position table; None leaves the interpolation to the device.
        spatial_merge_size: patches per side that become one token.

    Returns:
        ``vision_cu_seqlens`` int32 [S+1], ``vision_max_seqlen`` int, ``vision_segment_lengths`` tuple of S
        ints, ``vision_position_ids`` int64 [P, 2] and, with ``grid_side``, ``vision_interp_indices`` int64
        [P, 4] and ``vision_interp_weights`` float32 [P, 4].
    """
    from transformers import vision_utils

    lengths = vision_segment_lengths(image_grid_thw)
    tables: dict[str, Any] = {
        "vision_cu_seqlens": cumulative_lengths(lengths),
        "vision_max_seqlen": max(lengths),
        "vision_segment_lengths": lengths,
        "vision_position_ids": vision_utils.get_vision_position_ids(image_grid_thw, spatial_merge_size),
    }
    if grid_side is not None:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            image_grid_thw,
            num_grid_per_side=grid_side,
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=spatial_merge_size,
        )
        tables["vision_interp_indices"], tables["vision_interp_weights"] = indices, weights
    return tables


def cumulative_lengths(lengths: Sequence[int]) -> torch.Tensor:
    """Boundaries int32 [N+1] of N segments laid end to end."""
    boundaries = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=boundaries[1:])
    return torch.from_numpy(boundaries)
