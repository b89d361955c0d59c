"""Writes the TMDB: everything into a folder beside the target, which is renamed when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import BUILDER, VERSION
from .record import Item, Picture

CHECKSUM_RULE = (
    "sha256 over the lines of records.jsonl, then per image file in order of name: name, height, width and "
    "decoded RGB pixels; independent of PNG compression"
)


def write_tmdb(
    items: Iterable[tuple[str, int, Item]], output: Path, *, seed: int, overwrite: bool
) -> dict[str, Any]:
    """Write all items and return what went into ``metadata.json``.

    Raises:
        FileExistsError: ``output`` exists and ``overwrite`` is off.
        ValueError: there is no item.
        OSError: the disk is full or not writable; ``output`` is then as it was.
    """
    if output.exists() and not overwrite:
        raise FileExistsError(f"{output} exists")
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(output)
    folder = output.parent / f".{output.name}.{socket.gethostname()}-{os.getpid()}.part"
    folder.mkdir()
    try:
        metadata = _write(items, folder, seed)
        if output.exists():
            old = folder.with_suffix(".old")
            os.replace(output, old)
            os.replace(folder, output)
            shutil.rmtree(old)
        else:
            os.replace(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return metadata


def remove_leftovers(output: Path) -> None:
    """Delete the working folders that killed builds of the same output left on this machine."""
    prefix = f".{output.name}.{socket.gethostname()}-"
    for folder in output.parent.glob(f"{prefix}*"):
        process = folder.name.removeprefix(prefix).partition(".")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _write(items: Iterable[tuple[str, int, Item]], folder: Path, seed: int) -> dict[str, Any]:
    sources: Counter[str] = Counter()
    pixel_hashes: dict[str, bytes] = {}
    digest = hashlib.sha256()
    with open(folder / "records.jsonl", "w", encoding="utf-8", newline="\n") as records:
        for source, number, item in items:
            for picture in item.pictures:
                if picture.name not in pixel_hashes:
                    pixel_hashes[picture.name] = _write_picture(picture, folder)
            line = json.dumps(_record(source, number, item), ensure_ascii=False)
            records.write(line + "\n")
            digest.update(line.encode("utf-8") + b"\n")
            sources[source] += 1
        records.flush()
        os.fsync(records.fileno())
    if not sources:
        raise ValueError("no records: all sizes are 0")
    for name in sorted(pixel_hashes):
        digest.update(name.encode("utf-8") + b"\0" + pixel_hashes[name])
    metadata = {
        "num_records": sum(sources.values()),
        "sources": dict(sorted(sources.items())),
        "num_images": len(pixel_hashes),
        "builder": BUILDER,
        "builder_version": VERSION,
        "seed": seed,
        "checksum": digest.hexdigest(),
        "checksum_rule": CHECKSUM_RULE,
    }
    with open(folder / "metadata.json", "w", encoding="utf-8", newline="\n") as handle:
        handle.write(json.dumps(metadata, indent=2, ensure_ascii=False) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    return metadata


def _record(source: str, number: int, item: Item) -> dict[str, Any]:
    speakers = ("human", "gpt")
    return {
        "id": f"{source}-{number:06d}",
        "source": source,
        "images": [picture.name for picture in item.pictures],
        "conversations": [
            {"from": speakers[index % 2], "value": value} for index, value in enumerate(item.turns)
        ],
        "upstream": item.upstream,
    }


def _write_picture(picture: Picture, folder: Path) -> bytes:
    """Write or copy the picture; returns the digest of its size and pixels."""
    path = folder / picture.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if picture.file is not None:
        shutil.copyfile(picture.file, path)
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    else:
        pixels = picture.pixels
        Image.fromarray(pixels).save(path, compress_level=6)
    height, width = pixels.shape[:2]
    return hashlib.sha256(f"{height}x{width}\n".encode() + np.ascontiguousarray(pixels).tobytes()).digest()
