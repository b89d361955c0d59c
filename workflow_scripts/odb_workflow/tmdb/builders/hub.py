"""TMDB from data sets read with ``datasets``: on the Hub or on disk, streamed, nothing decoded."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...runtime.errors import UserError
from .rows import ID_COLUMNS, RowError, conversation_of, images_of, pick_column
from .sources import HubSource, HubSources, load_sources
from .writer import TmdbWriter

logger = logging.getLogger(__name__)

SHUFFLE_BUFFER = 1000
_NETWORK_MODULES = ("httpx", "httpcore", "requests", "aiohttp", "urllib3", "http.client", "ssl")
_FILE_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json"}


def build_from_datasets(
    sources_file: Path,
    folder: Path,
    open_rows: Callable[[HubSource, int], Iterator[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Fill ``folder`` with the records of every source, one after the other.

    Args:
        sources_file: YAML list of sources, see :class:`~.sources.HubSources`.
        folder: Folder of the TMDB to fill.
        open_rows: Gives the rows of a source from a row number on; for tests.

    Raises:
        UserError: the list is wrong, a data set, subset, split or column is not there, the network failed for
            good, or a source gave no record.
    """
    listed = load_sources(sources_file, HubSources)
    with TmdbWriter(folder) as writer:
        for source in listed.sources:
            logger.info("source %s: reading %s", source.name, source.path)
            for number, row in enumerate(_rows(source, listed.attempts, open_rows or open_dataset)):
                _add(writer, source, number, row)
            if not writer.sources[source.name]:
                raise UserError("the source gave no record", where=f"source {source.name} ({source.path})")
            logger.info("source %s: %d records", source.name, writer.sources[source.name])
        return writer.finish("hub", listed.sources)


def _add(writer: TmdbWriter, source: HubSource, number: int, row: dict[str, Any]) -> None:
    try:
        images = [writer.add_image(source.name, _bytes_of(image)) for image in images_of(row, source.columns)]
        turns = conversation_of(row, source.columns, source.prompt, len(images))
        own = pick_column(row, source.columns.id, ID_COLUMNS)
    except RowError as error:
        raise UserError(
            f"row {number} cannot be read: {error}",
            where=f"source {source.name} ({source.path})",
            fix="map its columns under `columns:` in the list of sources",
        ) from error
    upstream = {"dataset": source.path, "subset": source.subset, "split": source.split, "row": number}
    writer.add(source.name, turns, images, upstream | ({} if own is None else {"id": str(own)}))


def _rows(
    source: HubSource, attempts: int, open_rows: Callable[[HubSource, int], Iterator[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Rows up to the limit; after a network fault the stream is opened again behind the last row given."""
    wait = float(os.environ.get("ODB_WORKFLOW_RETRY_SECONDS", "2"))
    given = 0
    failures = 0
    while True:
        try:
            for row in open_rows(source, given):
                if source.limit and given >= source.limit:
                    return
                yield row
                given += 1
            return
        except Exception as error:
            failures += 1
            if not is_passing_fault(error):
                raise
            if failures >= attempts:
                raise UserError(
                    f"the data set could not be read after {attempts} attempts: {_first_line(error)}",
                    where=f"source {source.name} ({source.path}), row {given}",
                    fix="check the network, or download it and give its folder as path",
                ) from error
            logger.warning(
                "source %s: %s; attempt %d of %d goes on at row %d",
                source.name,
                _first_line(error),
                failures + 1,
                attempts,
                given,
            )
            time.sleep(wait * 2 ** (failures - 1))


def is_passing_fault(error: BaseException | None) -> bool:
    """Whether a second attempt can help: network faults and answers 429 and 5xx, also as a cause."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status == 429 or status >= 500
        if isinstance(error, (ConnectionError, TimeoutError)):
            return True
        if type(error).__module__.partition(".")[0] in _NETWORK_MODULES:
            return True
        error = error.__cause__ or error.__context__
    return False


def open_dataset(source: HubSource, start: int) -> Iterator[dict[str, Any]]:
    """Stream a source from row ``start`` on; images stay as encoded bytes.

    Raises:
        UserError: the data set, subset or split is not there, or access is refused.
    """
    import datasets

    try:
        data = _load(source)
        if getattr(data, "features", None) is None:
            data = data._resolve_features()
        data = data.decode(False)
    except Exception as error:
        if isinstance(error, UserError) or is_passing_fault(error):
            raise
        raise UserError(
            f"the data set cannot be opened: {type(error).__name__}: {_first_line(error)}",
            where=f"source {source.name}: path {source.path!r}, subset {source.subset!r}, "
            f"split {source.split!r}",
            fix="check path, subset and split; gated data sets need HF_TOKEN in the environment; scripts are "
            f"not run by datasets {datasets.__version__}",
        ) from error
    if source.shuffle_seed is not None:
        data = data.shuffle(seed=source.shuffle_seed, buffer_size=SHUFFLE_BUFFER)
    yield from data.skip(start) if start else data


def _load(source: HubSource) -> Any:
    """An ``IterableDataset`` of the source."""
    import datasets

    path = Path(source.path).expanduser()
    if not path.exists():
        if source.path.startswith((".", "/", "~")) or source.path.count("/") > 1:
            raise UserError(
                "the data set does not exist", where=f"source {source.name}: path {source.path!r}"
            )
        return datasets.load_dataset(
            source.path, source.subset, split=source.split, revision=source.revision, streaming=True
        )
    if path.is_file():
        builder = _FILE_BUILDERS.get(path.suffix)
        if builder is None:
            raise UserError(
                f"a file {path.suffix!r} cannot be read",
                where=f"source {source.name}: path {source.path!r}",
                fix="give a .parquet, .arrow, .jsonl or .json file, or a folder",
            )
        return datasets.load_dataset(builder, data_files=str(path), split="train", streaming=True)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            if source.split not in saved:
                raise UserError(
                    f"there is no split {source.split!r}, only {', '.join(saved)}",
                    where=f"source {source.name}: path {source.path!r}",
                )
            saved = saved[source.split]
        return saved.to_iterable_dataset()
    arrow = sorted(path.glob("*.arrow"))
    if arrow and not any(path.glob("*.parquet")):
        return datasets.load_dataset(
            "arrow", data_files=[str(file) for file in arrow], split="train", streaming=True
        )
    return datasets.load_dataset(str(path), source.subset, split=source.split, streaming=True)


def _bytes_of(image: Any) -> bytes:
    """Encoded bytes of an image as ``datasets`` gives it.

    Raises:
        RowError: not an image, or its file is not there.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, dict):
        if image.get("bytes"):
            return image["bytes"]
        image = image.get("path")
    if isinstance(image, str):
        if "://" in image:
            import fsspec

            with fsspec.open(image, "rb") as handle:
                return handle.read()
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise RowError(f"its image cannot be read: {error}") from error
    if hasattr(image, "save"):  # a decoded picture, where a data set stores none encoded
        stream = io.BytesIO()
        image.save(stream, format="PNG")
        return stream.getvalue()
    raise RowError(f"its image is {type(image).__name__}, not an image")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
