"""Small TMDBs for tests of the data path."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from odb_workflow.model.load import load_processor
from odb_workflow.tmdb.records import Record, Turn
from PIL import Image


@functools.cache
def cached_processor(model_dir: Path, image_max_pixels: int | None = None) -> Any:
    """The tiny model's processor, loaded once; do not change it."""
    return load_processor(model_dir, image_max_pixels)


def record(
    number: int | str = 0,
    images: int | list[str] = 0,
    turns: list[tuple[str, Any]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A sound record; ``images`` is a list of paths or a number of copies of ``images/ok.png``."""
    paths = ["images/ok.png"] * images if isinstance(images, int) else images
    question = "".join("<image>\n" for _ in paths) + "what color is the circle?"
    turns = turns or [("human", question), ("gpt", "red")]
    return {
        "id": number if isinstance(number, str) else f"r-{number:05d}",
        "source": "made",
        "images": paths,
        "conversations": [{"from": role, "value": value} for role, value in turns],
        "upstream": {},
        **more,
    }


def parsed_record(*turns: tuple[str, str], images: tuple[str, ...] = ()) -> Record:
    """A record as the store gives it: ``(role, text)`` of each turn."""
    return Record("r", "made", images, tuple(Turn(role, text) for role, text in turns))


def write_tmdb(folder: Path, records: list[dict[str, Any] | bytes], num_records: int | None = None) -> Path:
    """Write records (or raw lines) with ``metadata.json`` and ``images/ok.png`` (64x64, red)."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (255, 0, 0)).save(folder / "images" / "ok.png")
    lines = [
        line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in records
    ]
    (folder / "records.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    count = len(records) if num_records is None else num_records
    (folder / "metadata.json").write_text(json.dumps({"num_records": count}))
    return folder


def reject_lines(folder: Path) -> list[dict[str, Any]]:
    """``rejects.jsonl`` of a finished or stopped validation."""
    finished = folder / "rejects.jsonl"
    path = finished if finished.exists() else folder / "validation_failed" / "rejects.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
