"""The one image reader: training, both evaluations and the validation of a dataset see the same pixels.

What a reader of the file would see in a viewer is what the model gets, as 8-bit RGB:

* EXIF orientation is applied (JPEG, PNG, WebP, TIFF).
* Transparency is flattened on white; palettes are resolved; CMYK goes through its embedded profile where
  there is one.
* Integers beyond 8 bit are scaled by value range. The range is the smallest of 8, 10, 12, 14 and 16 bit
  that holds the largest value, because scanners and medical devices store 12 bit in 16-bit files, which
  would otherwise be nearly black. A full 16-bit ramp equals its 8-bit form.
* Float images: values within 0..1 are scaled by 255, values within 0..255 are taken as they are, anything
  else is stretched from its minimum to its maximum. NaN or infinity is a fault.
* Of an animated or multi-page file the first frame is used, with a note.
* A JPEG at least four times as wide and high as needed is decoded at 1/2, 1/4 or 1/8 (``draft``).

A file is always decoded to its end: opening alone does not notice a truncated one. Damage inside a JPEG
that its decoder conceals without a word (flipped bits, a cut hidden by an end marker) cannot be seen.
"""

from __future__ import annotations

import io
import os
import re
import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from PIL import Image, ImageCms, ImageFile, ImageOps

#: Larger images are refused before they are decoded (Pillow's own warning limit).
MAX_PIXELS = 89_478_485
MAX_FILE_BYTES = 1 << 29
#: Formats that are read; others (EPS starts an interpreter, PDF, video) are refused.
_WANTED = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
Image.init()
FORMATS = tuple(name for name in _WANTED if name in Image.ID)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # http:, file:, data:, C:
_ORIENTATION = 0x0112
_TURNING = (2, 3, 4, 5, 6, 7, 8)  # 1 is upright; what the standard does not define turns nothing
_SWAPPING = (5, 6, 7, 8)
_WHITE = (255, 255, 255)
#: A draft is at least this many times the size asked for, as in Pillow's ``thumbnail``: after the resize its
#: pixels differ by about one level of 255 from those of the full decoding.
DRAFT_GAP = 2

Size = tuple[int, int]


class BadImage(Exception):
    """An image that cannot be used. ``reason`` is a key of ``records.REASONS``."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")

    def __reduce__(self):
        return BadImage, (self.reason, self.detail)


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An RGB image. ``size`` is the full (width, height) after orientation, also where a draft is smaller."""

    image: Image.Image
    size: Size
    notes: tuple[str, ...]


def resolve_image_path(root: str, relative: str) -> str:
    """The path of an image inside a dataset folder.

    Args:
        root: ``os.path.realpath`` of the dataset folder.
        relative: The path as the record gives it.

    Raises:
        BadImage: ``path_outside`` for an absolute path, ``..``, an address, a drive letter, or a link that
        leaves the
            folder; nothing is opened.
    """
    if relative.startswith(("/", "\\", "~/")) or _ADDRESS.match(relative):
        raise BadImage("path_outside", f"{relative[:200]!r} is not a relative path")
    if ".." in relative.replace("\\", "/").split("/"):
        raise BadImage("path_outside", f"{relative[:200]!r} holds ..")
    if "\0" in relative:
        raise BadImage("path_outside", f"{relative[:200]!r} holds a NUL character")
    path = os.path.join(root, relative)
    real = os.path.realpath(path)
    if real != path and os.path.commonpath([root, real]) != root:
        raise BadImage("path_outside", f"{relative[:200]!r} is a link that leaves the dataset folder")
    return real


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        BadImage: missing, not a regular file (a pipe would block for ever), unreadable, or larger than 512
        MiB.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise BadImage("missing_file", "no such file") from None
    except OSError as error:
        raise BadImage("unreadable_file", error.strerror or str(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise BadImage("not_a_file", f"it is {kind}")
        if status.st_size > MAX_FILE_BYTES:
            raise BadImage("image_too_large", f"{status.st_size} bytes, the limit is {MAX_FILE_BYTES}")
        with os.fdopen(descriptor, "rb", closefd=False) as handle:
            return handle.read()
    except OSError as error:
        raise BadImage("unreadable_file", error.strerror or str(error)) from None
    finally:
        os.close(descriptor)


def content_hash(image: Image.Image) -> int:
    """64-bit hash of the decoded RGB pixels: equal for the same picture in another lossless file."""
    digest = xxhash.xxh3_64(f"{image.size}".encode())
    digest.update(image.tobytes())
    return int.from_bytes(digest.digest(), "big", signed=True)


def read_image(
    source: str | Path | bytes | Image.Image, needed: Callable[[int, int], Size] | None = None
) -> LoadedImage:
    """Read one image as 8-bit RGB by the rules of this module.

    Args:
        source: A file, its bytes, or an image that something else has opened (its pixels get the same
        treatment).
        needed: Maps the full (width, height) to the size that will be used; a JPEG much larger than that
        is decoded
            at a fraction. Without it every pixel is decoded.

    Raises:
        BadImage: the file cannot be read or decoded, or is too large.
        Exceptions of ``needed`` pass through.
    """
    if isinstance(source, Image.Image):
        return _finish(source, [])
    data = source if isinstance(source, bytes) else read_bytes(source)
    if not data:
        raise BadImage("broken_image", "the file is empty")
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # a library may have set it; it turns damage into grey areas
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = _open(data)
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise BadImage("image_too_large", f"{width}x{height} pixels, the limit is {MAX_PIXELS} in all")
        notes: list[str] = []
        full = None
        if needed is not None and opened.format in ("JPEG", "MPO"):
            turned = _orientation(opened) in _SWAPPING
            full = (height, width) if turned else (width, height)
            target = needed(*full)
            least = (target[1], target[0]) if turned else target
            opened.draft(None, (least[0] * DRAFT_GAP, least[1] * DRAFT_GAP))
        return _finish(opened, notes, full)


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadImage("image_too_large", str(error)) from None
    except Image.UnidentifiedImageError:
        head = data[:64].lstrip().lower()
        hint = (
            "it looks like a web page"
            if head.startswith((b"<!doctype", b"<html"))
            else f"it starts {data[:8]!r}"
        )
        raise BadImage("broken_image", f"no image format that is read ({hint})") from None
    except Exception as error:  # a damaged header makes Pillow's parsers raise almost anything
        raise BadImage("broken_image", _describe(error)) from error


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF data is no reason to refuse the picture
        return 1


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _finish(image: Image.Image, notes: list[str], full: Size | None = None) -> LoadedImage:
    """Decode, orient, and convert to RGB."""
    try:
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format != "MPO":  # an MPO's further pictures are previews of the first
            notes.append("first_frame_of_several")
        image.load()
        turned = _apply_orientation(image, notes)
        rgb = _to_rgb(turned, notes)
    except BadImage:
        raise
    except (
        Exception
    ) as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, IndexError, ...
        raise BadImage("broken_image", _describe(error)) from error
    return LoadedImage(rgb, full or rgb.size, tuple(notes))


def _apply_orientation(image: Image.Image, notes: list[str]) -> Image.Image:
    if _orientation(image) not in _TURNING:
        return image
    turned = ImageOps.exif_transpose(image)
    notes.append("exif_orientation")
    return turned


def _to_rgb(image: Image.Image, notes: list[str]) -> Image.Image:
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode in ("I", "F") or mode.startswith("I;16"):
        notes.append("float_scaled" if mode == "F" else "high_bit_depth_scaled")
        return _scale(image)
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _flatten(image.convert("RGBA"), notes)
    if mode == "CMYK":
        notes.append("cmyk")
        return _from_cmyk(image)
    if mode in ("1", "L", "P", "RGBX", "YCbCr", "HSV"):
        return image.convert("RGB")
    raise BadImage("unsupported_image", f"color mode {mode} cannot be converted")


def _flatten(image: Image.Image, notes: list[str]) -> Image.Image:
    alpha = image.getchannel("A")
    if alpha.getextrema()[0] == 255:
        return image.convert("RGB")
    notes.append("transparency_flattened")
    white = Image.new("RGB", image.size, _WHITE)
    white.paste(image.convert("RGB"), mask=alpha)
    return white


def _from_cmyk(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            return ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
        except (ImageCms.PyCMSError, OSError, ValueError):
            pass  # a damaged profile: the plain conversion below is what viewers fall back to as well
    return image.convert("RGB")


def _scale(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise BadImage("unsupported_image", f"mode {image.mode} with NaN or infinite pixels")
    if image.mode == "F":
        if low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        elif low >= 0 and high <= 255:
            low, high = 0.0, 255.0
    elif low >= 0 and high <= 65535:
        bits = next(bits for bits in (8, 10, 12, 14, 16) if high < 2**bits)
        low, high = 0.0, float(2**bits - 1)
    span = high - low or 1.0
    eight = np.rint((values - low) / span * 255.0).clip(0, 255).astype(np.uint8)
    return Image.fromarray(eight).convert("RGB")
