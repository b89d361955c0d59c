"""The image reader: what a viewer shows is what the model gets; anything else is a named fault."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from odb_workflow.tmdb.images import BadImage, content_hash, read_bytes, read_image, resolve_image_path
from PIL import Image, ImageFile

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encode(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def corners(image: Image.Image) -> list[str]:
    """Names of the colors near the four corners: top left, top right, bottom left, bottom right."""
    width, height = image.size
    names = {"R": RED, "G": GREEN, "B": BLUE, "W": WHITE}
    found = []
    for x, y in ((4, 4), (width - 5, 4), (4, height - 5), (width - 5, height - 5)):
        pixel = image.getpixel((x, y))
        found.append(
            min(names, key=lambda name: sum((a - b) ** 2 for a, b in zip(pixel, names[name], strict=True)))
        )
    return found


def quarters(width: int = 64, height: int = 32) -> Image.Image:
    """Red top left, green top right, blue bottom left, white bottom right."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 2, 0, width, height))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    image.paste(WHITE, (width // 2, height // 2, width, height))
    return image


# What a viewer shows of a file stored as R G / B W with each EXIF orientation.
ORIENTED = {1: "RGBW", 2: "GRWB", 3: "WBGR", 4: "BWRG", 5: "RBGW", 6: "BRWG", 7: "WGBR", 8: "GWRB"}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", list(ORIENTED))
def test_exif_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    loaded = read_image(encode(quarters(), kind, exif=exif))
    assert "".join(corners(loaded.image)) == ORIENTED[orientation]
    assert loaded.size == loaded.image.size == ((64, 32) if orientation < 5 else (32, 64))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_draft_of_a_large_jpeg_keeps_orientation_and_full_size(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    asked = []

    def needed(width: int, height: int) -> tuple[int, int]:
        asked.append((width, height))
        return width // 8, height // 8

    loaded = read_image(encode(quarters(1600, 800), "JPEG", exif=exif), needed)
    full = (1600, 800) if orientation < 5 else (800, 1600)
    assert asked == [full] and loaded.size == full
    assert loaded.image.size == (full[0] // 4, full[1] // 4)  # 1/8 would be below twice the size needed
    assert "".join(corners(loaded.image)) == ORIENTED[orientation]


def test_draft_only_where_it_hardly_changes_the_result() -> None:
    x, y = np.meshgrid(np.arange(1600), np.arange(1200))
    waves = np.stack([127 + 120 * np.sin(x / (9 + k) + y / 23) for k in range(3)], axis=-1)
    data = encode(Image.fromarray(waves.astype(np.uint8)), "JPEG", quality=92)
    for size, width in (((390, 290), 800), ((410, 310), 1600)):
        whole = read_image(data).image
        draft = read_image(data, lambda w, h, size=size: size).image
        assert draft.width == width
        pixels = [np.asarray(i.resize(size, Image.Resampling.BICUBIC)).astype(int) for i in (whole, draft)]
        assert np.abs(pixels[0] - pixels[1]).mean() < 1.5


def test_orientation_that_makes_no_sense_is_ignored() -> None:
    exif = Image.Exif()
    for orientation in (0, 9, 77):
        exif[0x0112] = orientation
        loaded = read_image(encode(quarters(), "JPEG", exif=exif))
        assert loaded.size == (64, 32) and loaded.notes == ()
    assert read_image(encode(quarters(), "JPEG", exif=b"Exif\0\0broken")).size == (64, 32)


@pytest.mark.parametrize(
    ("mode", "pixel", "expected"),
    [
        ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
        ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 128), (127, 127, 127)),
        ("LA", (0, 0), (255, 255, 255)),
        ("LA", (40, 255), (40, 40, 40)),
        ("L", 90, (90, 90, 90)),
        ("1", 1, (255, 255, 255)),
    ],
)
def test_transparency_is_flattened_on_white(mode: str, pixel, expected) -> None:
    loaded = read_image(encode(Image.new(mode, (8, 8), pixel), "PNG"))
    assert loaded.image.mode == "RGB"
    assert max(abs(a - b) for a, b in zip(loaded.image.getpixel((3, 3)), expected, strict=True)) <= 1
    assert ("transparency_flattened" in loaded.notes) == (mode in ("RGBA", "LA") and pixel[-1] < 255)


def test_palette_with_and_without_transparency() -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(1, (0, 0, 4, 8))
    assert read_image(encode(image, "PNG")).image.getpixel((1, 1)) == (200, 100, 50)
    clear = read_image(encode(image, "PNG", transparency=0))
    assert clear.image.getpixel((6, 1)) == WHITE and clear.image.getpixel((1, 1)) == (200, 100, 50)


@pytest.mark.parametrize(("mode", "color"), [("RGB", (1, 2, 3)), ("L", 7)])
def test_single_transparent_color(mode: str, color) -> None:
    image = Image.new(mode, (8, 8), color)
    assert read_image(encode(image, "PNG", transparency=color)).image.getpixel((0, 0)) == WHITE


def test_cmyk_jpeg() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # no cyan, full magenta and yellow: red
    loaded = read_image(encode(image, "JPEG", quality=95))
    red, green, blue = loaded.image.getpixel((8, 8))
    assert red > 240 and green < 15 and blue < 15 and loaded.notes == ("cmyk",)


def test_sixteen_bit_ranges() -> None:
    def scaled(largest: int) -> np.ndarray:
        values = np.linspace(0, largest, 256).astype(np.uint16).reshape(16, 16)
        return np.asarray(read_image(encode(Image.fromarray(values), "PNG")).image)[..., 0].ravel()

    full = np.arange(256)
    for largest in (255, 1023, 4095, 16383, 65535):
        assert np.abs(scaled(largest).astype(int) - full).max() <= 1
    assert scaled(2000).max() == round(2000 / 4095 * 255)  # scaled by its 12-bit range, not stretched


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]]), [0, 128, 255]),
        (np.array([[0.0, 100.0, 255.0]]), [0, 100, 255]),
        (np.array([[-2.0, 0.0, 2.0]]), [0, 128, 255]),
        (np.array([[0.0, 500.0, 1000.0]]), [0, 128, 255]),
        (np.array([[7.5e9, 7.5e9, 7.5e9]]), [0, 0, 0]),
    ],
)
def test_float_images(values: np.ndarray, expected: list[int]) -> None:
    loaded = read_image(encode(Image.fromarray(values.astype(np.float32)), "TIFF"))
    assert np.asarray(loaded.image)[0, :, 0].tolist() == expected and loaded.notes == ("float_scaled",)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_float_image_that_is_not_finite(bad: float) -> None:
    image = Image.fromarray(np.array([[0.0, bad]], dtype=np.float32))
    with pytest.raises(BadImage, match="NaN or infinite"):
        read_image(encode(image, "TIFF"))


def test_thirty_two_bit_integers() -> None:
    image = Image.fromarray(np.array([[0, 32768, 65535]], dtype=np.int32))
    assert np.asarray(read_image(encode(image, "TIFF")).image)[0, :, 0].tolist() == [0, 128, 255]
    image = Image.fromarray(np.array([[-100, 0, 100]], dtype=np.int32))
    assert np.asarray(read_image(encode(image, "TIFF")).image)[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_several(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in (RED, BLUE, GREEN)]
    options = {"lossless": True} if kind == "WEBP" else {}
    loaded = read_image(encode(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    assert loaded.image.getpixel((8, 8)) == RED and loaded.notes == ("first_frame_of_several",)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_files(kind: str, share: float) -> None:
    noise = Image.fromarray(np.random.default_rng(3).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    data = encode(noise, kind)
    assert read_image(data).size == (64, 64)
    for needed in (None, lambda width, height: (8, 8)):
        with pytest.raises(BadImage) as caught:
            read_image(data[: int(len(data) * share)], needed)
        assert caught.value.reason == "broken_image"


def test_truncation_is_found_although_a_library_asked_to_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = encode(quarters(256, 256), "JPEG")
    with pytest.raises(BadImage):
        read_image(data[: len(data) // 2])


def png_of_size(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 9))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs_are_refused_before_decoding(width: int, height: int) -> None:
    with pytest.raises(BadImage) as caught:
        read_image(png_of_size(width, height))
    assert caught.value.reason in ("image_too_large", "broken_image")


def test_image_without_pixels() -> None:
    with pytest.raises(BadImage):
        read_image(png_of_size(0, 5))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"%PDF-1.4\n",
        b"<!DOCTYPE html><html>404</html>",
        b"GIF89a",
        b"\xff\xd8\xff",
        b"RIFF\0\0\0\0WEBP",
    ],
)
def test_files_that_are_no_images(data: bytes) -> None:
    with pytest.raises(BadImage) as caught:
        read_image(data)
    assert caught.value.reason == "broken_image"


@pytest.mark.parametrize(
    "path",
    [
        "../x.png",
        "a/../../x.png",
        "images/../images/ok.png",
        "/etc/passwd",
        "..",
        "..\\x.png",
        "\\x.png",
        "C:\\x.png",
        "http://example.com/x.png",
        "https://example.com/x.png",
        "file:///etc/passwd",
        "data:image/png;base64,AA",
        "s3://bucket/x.png",
        "~/x.png",
        "a\0b.png",
    ],
)
def test_paths_that_leave_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(BadImage) as caught:
        resolve_image_path(os.path.realpath(tmp_path), path)
    assert caught.value.reason == "path_outside"


def test_links(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "images").mkdir(parents=True)
    quarters().save(root / "images" / "ok.png")
    (tmp_path / "secret").mkdir()
    quarters().save(tmp_path / "secret" / "x.png")
    (tmp_path / "data-other").mkdir()
    quarters().save(tmp_path / "data-other" / "x.png")
    (root / "inside.png").symlink_to("images/ok.png")
    (root / "outside.png").symlink_to(tmp_path / "secret" / "x.png")
    (root / "twice.png").symlink_to("outside.png")
    (root / "folder").symlink_to(tmp_path / "secret")
    (root / "sibling.png").symlink_to(tmp_path / "data-other" / "x.png")  # its path begins like the root's
    (root / "zero.png").symlink_to("/dev/zero")
    real = os.path.realpath(root)
    assert read_image(resolve_image_path(real, "inside.png")).size == (64, 32)
    for name in ("outside.png", "twice.png", "folder/x.png", "sibling.png", "zero.png"):
        with pytest.raises(BadImage) as caught:
            resolve_image_path(real, name)
        assert caught.value.reason == "path_outside"


def test_ordinary_odd_names(tmp_path: Path) -> None:
    real = os.path.realpath(tmp_path)
    for name in (
        "a b.png",
        "größe/图.png",
        "..hidden.png",
        "a..b.png",
        "./x.png",
        "with/a:b.png",
        "12:30.png",
        "~x.png",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        quarters().save(path)
        assert read_image(resolve_image_path(real, name)).size == (64, 32)


def test_things_that_are_not_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    for name, reason in {
        "pipe.png": "not_a_file",  # opening it plainly would wait for a writer for ever
        "none.png": "missing_file",
        "": "not_a_file",
        "loop.png": "unreadable_file",
        "x" * 300: "unreadable_file",
    }.items():
        with pytest.raises(BadImage) as caught:
            read_bytes(tmp_path / name)
        assert caught.value.reason == reason


def test_file_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odb_workflow.tmdb.images.MAX_FILE_BYTES", 10)
    (tmp_path / "x.png").write_bytes(b"12345678901")
    with pytest.raises(BadImage, match="11 bytes"):
        read_bytes(tmp_path / "x.png")


def test_content_hash_sees_pixels_not_files() -> None:
    picture = quarters()
    as_png, as_bmp = read_image(encode(picture, "PNG")), read_image(encode(picture, "BMP"))
    assert content_hash(as_png.image) == content_hash(as_bmp.image)
    changed = picture.copy()
    changed.putpixel((0, 0), (254, 0, 0))
    assert content_hash(changed) != content_hash(picture)
    wide, tall = Image.new("RGB", (8, 4)), Image.new("RGB", (4, 8))
    assert content_hash(wide) != content_hash(tall)


def test_image_that_something_else_opened() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    opened = Image.open(io.BytesIO(encode(quarters(), "JPEG", exif=exif)))
    assert read_image(opened).size == (32, 64)
    assert read_image(Image.new("RGBA", (4, 4))).image.getpixel((0, 0)) == WHITE
