"""TMDB from LLaVA or ShareGPT files: JSON or JSONL records with an image folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ...runtime.errors import UserError
from ...runtime.files import iter_lines
from .rows import ID_COLUMNS, RowError, conversation_of, images_of, pick_column
from .sources import JsonSource, JsonSources, load_sources
from .writer import TmdbWriter

logger = logging.getLogger(__name__)


def build_from_json(sources_file: Path, folder: Path) -> dict[str, Any]:
    """Fill ``folder`` with the records of every file, one after the other.

    Image files that are not there are counted here and rejected by name in the validation pass.

    Args:
        sources_file: YAML list of sources, see :class:`~.sources.JsonSources`; paths in it are relative to
            the working directory.
        folder: Folder of the TMDB to fill.

    Raises:
        UserError: the list or a file is wrong, an image path leaves its folder, or a file has no record.
    """
    listed = load_sources(sources_file, JsonSources)
    with TmdbWriter(folder) as writer:
        for source in listed.sources:
            missing = 0
            for number, row in enumerate(read_records(Path(source.path))):
                if source.limit and number >= source.limit:
                    break
                missing += _add(writer, source, number, row)
            if not writer.sources[source.name]:
                raise UserError("the file has no record", where=f"source {source.name} ({source.path})")
            if missing:
                logger.warning("source %s: %d image files are missing", source.name, missing)
            logger.info("source %s: %d records", source.name, writer.sources[source.name])
        return writer.finish("json", listed.sources)


def read_records(path: Path) -> Iterator[Any]:
    """Records of a JSON list or of JSON lines, told apart by the first character.

    JSON lines are streamed; a JSON list is read whole (about five times its size in memory).

    Raises:
        UserError: missing, not JSON, or neither a list nor lines; names file and line.
    """
    try:
        with open(path, "rb") as handle:
            start = handle.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if start == b"[":
            records = json.loads(path.read_text(encoding="utf-8-sig"))
            yield from records
            return
        for number, line in iter_lines(path):
            if line.strip():
                try:
                    yield json.loads(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                except ValueError as error:
                    raise UserError(
                        f"line {number} is not JSON: {error}", where=str(path), fix="write one record a line"
                    ) from error
    except FileNotFoundError:
        raise UserError("the file does not exist", where=str(path), fix="check path in the list") from None
    except (ValueError, OSError) as error:
        raise UserError(f"not a readable JSON file: {error}", where=str(path)) from error


def _add(writer: TmdbWriter, source: JsonSource, number: int, row: Any) -> int:
    """Add one record; returns how many of its image files are missing."""
    where = f"source {source.name} ({source.path})"
    if not isinstance(row, dict):
        raise UserError(f"record {number} is no object but {type(row).__name__}", where=where)
    base = Path(source.images) if source.images else Path(source.path).parent
    try:
        given = [_relative(image, base) for image in images_of(row, source.columns)]
        turns = conversation_of(row, source.columns, source.prompt, len(given))
        own = pick_column(row, source.columns.id, ID_COLUMNS)
    except RowError as error:
        raise UserError(
            f"record {number} cannot be read: {error}",
            where=where,
            fix="mend it, or map its keys under `columns:` in the list of sources",
        ) from error
    link = source.place_images == "hardlink"
    images = [writer.place_image(source.name, name, base / name, link) for name in given]
    upstream = {"file": Path(source.path).name, "row": number} | ({} if own is None else {"id": str(own)})
    writer.add(source.name, turns, images, upstream)
    return sum(not (base / name).is_file() for name in given)


def _relative(image: Any, base: Path) -> str:
    """The image path relative to its folder.

    Raises:
        RowError: no path, an address, or a path that leaves the folder.
    """
    if isinstance(image, dict):
        image = image.get("path") or image.get("url")
    if not isinstance(image, str):
        raise RowError(f"an image is {type(image).__name__}, not a path")
    if "://" in image:
        raise RowError(f"the image {image!r} is an address; download it into the image folder")
    path = PurePosixPath(image.replace("\\", "/"))
    if path.is_absolute():
        try:
            path = PurePosixPath(Path(image).relative_to(base.absolute()).as_posix())
        except ValueError:
            raise RowError(f"the image {image!r} lies outside {base}") from None
    if ".." in path.parts:
        raise RowError(f"the image {image!r} leaves its folder")
    return path.as_posix()
