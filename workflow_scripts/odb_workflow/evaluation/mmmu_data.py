"""Rows in MMMU's layout, from the Hub, a folder of parquet files, a saved dataset or one file.

All sources become Arrow tables held as ``datasets.Dataset``; images stay encoded until a row is scored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from odb_workflow.runtime.errors import UserError
from odb_workflow.runtime.files import read_jsonl

from .mmmu_protocol import IMAGE_COLUMNS
from .mmmu_subjects import SUBJECTS, select_subjects

logger = logging.getLogger(__name__)

REQUIRED_COLUMNS = ("question", "options", "answer")
_ID_COLUMNS = ("id", "sample_id", "question_id")
_SPLITS = ("dev", "validation", "test", "train")
_SUBJECT_IN_ID = re.compile(rf"^(?:{'|'.join(_SPLITS)})_(.+)_[^_]+$")


@dataclass
class BenchmarkRow:
    """One row: its text columns, and where its images are read from when they are needed."""

    sample_id: str
    subject: str
    columns: dict[str, Any]
    present: tuple[int, ...]
    _table: datasets.Dataset = field(repr=False)
    _index: int
    _folder: Path | None

    def image(self, number: int) -> bytes | Path:
        """The encoded image of column ``image_<number>``: its bytes, or the file that holds it."""
        return _encoded(self._table[self._index][f"image_{number}"], self._folder)


@dataclass
class Benchmark:
    """The rows of the chosen subjects, subject by subject in the chosen order.

    Attributes:
        subjects: Chosen subjects.
        absent: Subjects of MMMU that the source does not hold; empty when subjects were named.
    """

    rows: list[BenchmarkRow]
    subjects: list[str]
    absent: list[str]

    def checksum(self) -> str:
        """Hex SHA-256 over ids, texts and image bytes of all rows, in order."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.sample_id, row.subject, row.columns], default=str).encode())
            for number in row.present:
                value = row.image(number)
                content = (
                    value if isinstance(value, bytes) else value.read_bytes() if value.is_file() else b""
                )
                digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()


def load_benchmark(source: str, split: str, subjects: Sequence[str] | None) -> Benchmark:
    """Read the rows of ``subjects`` (None: all there are).

    Args:
        source: A folder with one folder of parquet files (or one saved dataset) per subject; a folder of
            parquet files or a saved dataset whose ids or ``subject`` column name the subject; one parquet or
            JSON-lines file; or a dataset id on the Hub.
        split: Read from ``<split>-*.parquet``, the saved dataset's split, or the Hub's.

    Raises:
        UserError: the source cannot be read, lacks the split, a column or a subject, or holds no rows.
    """
    path = Path(source)
    tables = _local_tables(path, split) if path.exists() else None
    if tables is None:
        if not _looks_like_hub_id(source):
            raise UserError(
                "the benchmark dataset does not exist", where=source, fix="give a folder, a file or a Hub id"
            )
        chosen = select_subjects(subjects, _hub_subjects(source), where=source)
        tables = [(name, _hub_table(source, name, split)) for name in chosen]
    folder = path if path.is_dir() else path.parent if path.exists() else None
    by_subject: dict[str, list[BenchmarkRow]] = {}
    for subject, table in tables:
        for row in _rows(subject, table, folder, source):
            by_subject.setdefault(row.subject, []).append(row)
    if not by_subject:
        raise UserError("the benchmark dataset holds no rows", where=f"{source}, split {split}")
    chosen = select_subjects(subjects, by_subject, where=source)
    rows = [row for name in chosen for row in by_subject[name]]
    _check_ids(rows, source)
    absent = [] if subjects else [name for name in SUBJECTS if name not in by_subject]
    return Benchmark(rows=rows, subjects=chosen, absent=absent if len(absent) < len(SUBJECTS) else [])


def _local_tables(path: Path, split: str) -> list[tuple[str | None, datasets.Dataset]]:
    if path.is_file():
        return [(None, _file_table(path))]
    if _is_saved(path):
        return _saved_tables(path, split, None)
    tables: list[tuple[str | None, datasets.Dataset]] = []
    splits: set[str] = set()
    for folder in sorted(
        child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")
    ):
        if _is_saved(folder):
            tables += _saved_tables(folder, split, folder.name)
        elif files := sorted(folder.glob("*.parquet")):
            splits |= {_split_of(file) for file in files}
            tables += [(folder.name, _file_table(file)) for file in files if _split_of(file) == split]
    if not tables:
        files = sorted(path.glob("*.parquet"))
        splits |= {_split_of(file) for file in files}
        if splits & set(_SPLITS):
            files = [file for file in files if _split_of(file) == split]
        tables = [(None, _file_table(file)) for file in files]
    if not tables:
        there = f"; splits there: {', '.join(sorted(splits))}" if splits else ""
        raise UserError(
            f"no rows of split {split!r} in this folder{there}",
            where=str(path),
            fix="expected <Subject>/validation-00000-of-00001.parquet, or a dataset saved by save_to_disk",
        )
    return tables


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _saved_tables(folder: Path, split: str, subject: str | None) -> list[tuple[str | None, datasets.Dataset]]:
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(f"cannot read the saved dataset: {error}", where=str(folder)) from error
    if isinstance(loaded, datasets.Dataset):
        return [(subject, loaded)]
    if split in loaded:
        return [(subject, loaded[split])]
    if subject is None and any(name in SUBJECTS for name in loaded):
        return list(loaded.items())
    raise UserError(f"no split {split!r}; splits there: {', '.join(loaded)}", where=str(folder))


def _split_of(file: Path) -> str:
    return re.split(r"[-.]", file.name, maxsplit=1)[0]


def _file_table(file: Path) -> datasets.Dataset:
    try:
        if file.suffix == ".parquet":
            return datasets.Dataset(pq.read_table(file))
        if file.suffix in (".jsonl", ".json"):
            return datasets.Dataset.from_list(read_jsonl(file))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"cannot read the benchmark file: {error}", where=str(file)) from error
    raise UserError("not a parquet or JSON-lines file", where=str(file))


def _looks_like_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not source.startswith((".", "/"))


def _hub_subjects(source: str) -> list[str]:
    if source == "MMMU/MMMU":  # known, so that a cached copy needs no network
        return list(SUBJECTS)
    try:
        return [name for name in datasets.get_dataset_config_names(source) if name != "default"] or [
            "default"
        ]
    except Exception as error:
        raise _hub_error(source, error) from error


def _hub_table(source: str, subject: str, split: str) -> datasets.Dataset:
    try:
        return datasets.load_dataset(source, subject, split=split)
    except Exception as error:
        raise _hub_error(f"{source}, subject {subject}, split {split}", error) from error


def _hub_error(where: str, error: Exception) -> UserError:
    # datasets raises a dozen unrelated classes for "not reachable", "not cached", "gated"
    # and "no such split".
    return UserError(
        f"cannot read the dataset from the Hub: {type(error).__name__}: {error}",
        where=where,
        fix="check the id, the network and HF_HUB_OFFLINE, or give --dataset a local folder",
    )


def _rows(
    subject: str | None, table: datasets.Dataset, folder: Path | None, source: str
) -> list[BenchmarkRow]:
    missing = [name for name in REQUIRED_COLUMNS if name not in table.column_names]
    if missing:
        raise UserError(
            f"columns missing: {', '.join(missing)}",
            where=f"{source}{f', subject {subject}' if subject else ''}",
            fix="the rows must have MMMU's columns: id, question, options, answer, image_1 .. image_7",
        )
    image_columns = [name for name in IMAGE_COLUMNS if name in table.column_names]
    for name in image_columns:
        if isinstance(table.features[name], datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
    texts = table.remove_columns([name for name in table.column_names if name in IMAGE_COLUMNS]).to_list()
    present = {name: _not_null(table, name) for name in image_columns}
    rows = []
    for index, columns in enumerate(texts):
        sample_id = next(
            (str(columns[key]) for key in _ID_COLUMNS if columns.get(key) not in (None, "")), None
        )
        name = subject or columns.get("subject") or _subject_of(sample_id) or "unknown"
        rows.append(
            BenchmarkRow(
                sample_id=sample_id or f"{name}:{index}",
                subject=name,
                columns=columns,
                present=tuple(
                    number
                    for number, column in enumerate(IMAGE_COLUMNS, start=1)
                    if column in present and present[column][index]
                ),
                _table=table,
                _index=index,
                _folder=folder,
            )
        )
    return rows


def _not_null(table: datasets.Dataset, column: str) -> list[bool]:
    """Which rows hold an image: a struct with neither bytes nor path is none, as is an empty path."""
    chunked = table.data.column(column)
    if table._indices is not None:  # a saved selection keeps an index; its Arrow rows are in another order
        return [_has_image(value) for value in table[column]]
    if pa.types.is_struct(chunked.type):
        parts = [
            pa.compute.is_valid(pa.compute.struct_field(chunked, name))
            for name in ("bytes", "path")
            if chunked.type.get_field_index(name) >= 0
        ]
        return pa.compute.and_(
            pa.compute.is_valid(chunked), parts[0] if len(parts) == 1 else pa.compute.or_(*parts)
        ).to_pylist()
    return [_has_image(value) for value in chunked.to_pylist()]


def _has_image(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("bytes") is not None or bool(value.get("path"))
    return value not in (None, "")


def _encoded(value: Any, folder: Path | None) -> bytes | Path:
    if isinstance(value, dict):
        if value.get("bytes") is not None:
            return value["bytes"]
        value = value.get("path")
    path = Path(str(value))
    return path if path.is_absolute() or folder is None else folder / path


def _subject_of(sample_id: str | None) -> str | None:
    match = _SUBJECT_IN_ID.match(sample_id or "")
    return match.group(1) if match else None


def _check_ids(rows: Sequence[BenchmarkRow], source: str) -> None:
    seen: dict[str, str] = {}
    doubled = []
    for row in rows:
        if row.sample_id in seen:
            doubled.append(row.sample_id)
        seen[row.sample_id] = row.subject
    if doubled:
        raise UserError(f"ids come more than once: {', '.join(doubled[:5])}", where=source)
