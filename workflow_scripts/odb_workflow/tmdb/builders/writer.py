"""Writes a TMDB record by record; images are stored once each under the name of their content."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ...runtime.files import atomic_write_json, dump_json
from ...runtime.provenance import without_home
from .rows import Turn
from .sources import Source

# first bytes -> ending; only for the name, since readers go by content
_SIGNATURES = (
    (b"\x89PNG", "png"),
    (b"\xff\xd8\xff", "jpg"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)


def ending_of(data: bytes) -> str:
    """File name ending for image bytes; ``img`` for a format that is not known."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((ending for start, ending in _SIGNATURES if data.startswith(start)), "img")


def _described(source: Source) -> dict[str, Any]:
    """The settings of a source without home folders."""
    return {
        key: without_home(value) if isinstance(value, str) else value
        for key, value in source.model_dump(mode="json", exclude_defaults=True).items()
    }


def _linked(file: Path, target: Path) -> bool:
    """Hard-link ``file``; False where the two folders lie on different disks."""
    try:
        os.link(file, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


class TmdbWriter:
    """Context manager that fills ``folder``; ``metadata.json`` is written last, by :meth:`finish`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: Counter[str] = Counter()
        self.images: set[str] = set()
        self._digest = hashlib.sha256()
        self._records = open(folder / "records.jsonl", "w", encoding="utf-8", newline="\n")  # noqa: SIM115

    def __enter__(self) -> TmdbWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._records.close()

    def add_image(self, source: str, data: bytes) -> str:
        """Store image bytes once; returns the path relative to the TMDB."""
        name = hashlib.sha256(data).hexdigest()
        relative = f"images/{source}/{name[:2]}/{name}.{ending_of(data)}"
        if relative not in self.images:
            path = self.folder / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            self.images.add(relative)
        return relative

    def place_image(self, source: str, relative: str, file: Path, hardlink: bool) -> str:
        """Copy or link a file to ``images/<source>/<relative>``; a missing one is left for validation."""
        target = f"images/{source}/{relative}"
        if target not in self.images and file.is_file():
            path = self.folder / target
            path.parent.mkdir(parents=True, exist_ok=True)
            if not (hardlink and _linked(file.resolve(), path)):
                shutil.copyfile(file, path)
            self.images.add(target)
        return target

    def add(self, source: str, turns: list[Turn], images: list[str], upstream: dict[str, Any]) -> None:
        """Append one record; its id is the source with a running number."""
        record = {
            "id": f"{source}-{self.sources[source]:07d}",
            "source": source,
            "images": images,
            "conversations": turns,
            "upstream": upstream,
        }
        line = dump_json(record) + "\n"
        self._records.write(line)
        self._digest.update(line.encode("utf-8", "surrogatepass"))
        self.sources[source] += 1

    def finish(self, builder: str, upstream: Sequence[Source]) -> dict[str, Any]:
        """Write ``metadata.json``; its checksum covers ``records.jsonl``."""
        self._records.flush()
        os.fsync(self._records.fileno())
        metadata = {
            "num_records": sum(self.sources.values()),
            "sources": dict(sorted(self.sources.items())),
            "num_images": len(self.images),
            "builder": builder,
            "checksum": self._digest.hexdigest(),
            "upstream": [_described(source) for source in upstream],
        }
        atomic_write_json(self.folder / "metadata.json", metadata)
        return metadata
