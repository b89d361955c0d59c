"""Pixels of one image for the Qwen2-VL/Qwen3-VL image processor, without its detours.

Same operations as ``Qwen2VLImageProcessor`` (bicubic resize of 8-bit pixels, one subtraction and division,
patches in merge order), but patches are cut while the pixels are bytes, each is normalized once, and its
temporal copy is written straight into the result.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tvF

from ..tmdb.images import BadImage, Size

MAX_ASPECT = 200
_CHUNK = 128
_INTERPOLATION = {
    Image.Resampling.BICUBIC: InterpolationMode.BICUBIC,
    Image.Resampling.BILINEAR: InterpolationMode.BILINEAR,
}


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """What the image processor does; ``min_pixels`` and ``max_pixels`` bound the resized image."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    interpolation: InterpolationMode

    @classmethod
    def of(cls, image_processor: Any) -> VisionSettings | None:
        """The settings of a Qwen2-VL style image processor, or None for any other kind."""
        if not type(image_processor).__name__.startswith("Qwen2VLImageProcessor"):
            return None
        size = image_processor.size
        resample = image_processor.resample
        switches = (image_processor.do_resize, image_processor.do_rescale, image_processor.do_normalize)
        if not all(switches) or resample not in _INTERPOLATION:
            return None
        return cls(
            patch_size=image_processor.patch_size,
            merge_size=image_processor.merge_size,
            temporal_patch_size=image_processor.temporal_patch_size,
            min_pixels=int(size["shortest_edge"]),
            max_pixels=int(size["longest_edge"]),
            mean=tuple(image_processor.image_mean),
            std=tuple(image_processor.image_std),
            rescale_factor=image_processor.rescale_factor,
            interpolation=_INTERPOLATION[resample],
        )

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of this."""
        return self.patch_size * self.merge_size

    def resized(self, width: int, height: int) -> Size:
        """(width, height) after the resize, by Qwen's ``smart_resize``.

        Raises:
            BadImage: ``extreme_aspect`` above 200 to 1.
        """
        if max(width, height) > MAX_ASPECT * min(width, height):
            ratio = max(width, height) / max(min(width, height), 1)
            raise BadImage(
                "extreme_aspect", f"{width}x{height} pixels, {ratio:.1f} to 1, the limit is {MAX_ASPECT}"
            )
        factor = self.factor
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            new_height = max(factor, math.floor(height / beta / factor) * factor)
            new_width = max(factor, math.floor(width / beta / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * beta / factor) * factor
            new_width = math.ceil(width * beta / factor) * factor
        return new_width, new_height

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(1, rows, columns) of patches of an image of this full size."""
        new_width, new_height = self.resized(width, height)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Image tokens of a grid."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2


def pixels_of(image: Image.Image) -> torch.Tensor:
    """uint8 ``[3 or 4, H, W]`` of an RGB image, in height-width-channel memory order.

    Pillow keeps RGB in 4 bytes a pixel; through its Arrow interface they are used in place, and the fourth
    channel is to be ignored. Older Pillow, or an image in several blocks of memory, is copied.
    """
    if hasattr(image, "__arrow_c_array__"):
        with contextlib.suppress(AttributeError, BufferError, NotImplementedError, TypeError, ValueError):
            flat = torch.from_dlpack(pa.array(image).flatten())
            return flat.view(image.height, image.width, 4).permute(2, 0, 1)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class PatchMaker:
    """Turns RGB images into ``pixel_values`` rows.

    Args:
        settings: What the image processor does.
        dtype: Type of the patches; bfloat16 halves what goes through a worker's queue.
    """

    def __init__(self, settings: VisionSettings, dtype: torch.dtype = torch.float32) -> None:
        self.settings, self.dtype = settings, dtype
        scale = 1.0 / settings.rescale_factor
        self._mean = (torch.tensor(settings.mean) * scale).view(1, 3, 1, 1)
        self._std = (torch.tensor(settings.std) * scale).view(1, 3, 1, 1)

    def __call__(self, image: Image.Image, full_size: Size) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Patches ``[P, 3 * temporal * patch * patch]`` and the grid (1, rows, columns), P = rows
        x columns.

        Args:
            image: RGB; may be a smaller draft of the picture.
            full_size: (width, height) of the picture, which decides the resize.
        """
        settings = self.settings
        width, height = settings.resized(*full_size)
        pixels = pixels_of(image)
        if (width, height) != image.size:
            # Left in its height-width-channel memory order, which torch resizes 2-3 times faster, to equal
            # bytes.
            pixels = tvF.resize(pixels, [height, width], interpolation=settings.interpolation, antialias=True)
        return self.patches(pixels[:3]), (1, height // settings.patch_size, width // settings.patch_size)

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 ``[3, H, W]`` (sides multiples of ``factor``) to ``[P, D]`` in merge order."""
        settings = self.settings
        patch, merge, copies = settings.patch_size, settings.merge_size, settings.temporal_patch_size
        _, height, width = pixels.shape
        rows, columns = height // patch, width // patch
        planes = np.ascontiguousarray(pixels.numpy())  # numpy moves bytes between layouts faster than torch
        cut = planes.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        cut = np.ascontiguousarray(cut.transpose(1, 4, 2, 5, 0, 3, 6)).reshape(-1, 3, 1, patch * patch)
        out = torch.empty(rows * columns, 3, copies, patch * patch, dtype=self.dtype)
        for start in range(0, len(out), _CHUNK):  # small enough to stay in the cache
            block = torch.from_numpy(cut[start : start + _CHUNK]).to(torch.float32)
            out[start : start + _CHUNK] = block.sub_(self._mean).div_(self._std)
        return out.view(rows * columns, -1)
