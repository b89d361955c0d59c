"""The accepted set: what the validation let through; training, validation loss and lengths start from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ..processing.identity import processor_identity
from ..runtime.errors import UserError
from ..runtime.files import read_json
from .split import Split, split_rows
from .store import RecordStore

VALIDATION_NAME = "validation.json"
ACCEPTED_NAME = "accepted.parquet"
REJECTS_NAME = "rejects.jsonl"
#: Folder inside the output folder that a validation which stopped writes instead.
FAILED_FOLDER = "validation_failed"


@dataclass(eq=False)
class AcceptedSet:
    """Rows of ``records.jsonl`` that passed, ascending, with what was measured of each.

    Attributes:
        rows: int64 ``[n]``.
        lengths: int32 ``[n]``, tokens after template, vision expansion and cut.
        label_tokens: int32 ``[n]``, label tokens that the next-token loss uses.
        data_checksum: SHA-256 over every record and every image file.
        n_records: All records of the file, rejected ones included.
        info: The whole of ``validation.json``.
    """

    folder: Path
    rows: np.ndarray
    lengths: np.ndarray
    label_tokens: np.ndarray
    data_checksum: str
    n_records: int
    info: dict[str, Any]

    @classmethod
    def load(cls, validation_dir: str | Path) -> AcceptedSet:
        """Read the result of ``validate_tmdb``.

        Raises:
            UserError: the validation did not finish, or its files do not belong together.
        """
        folder = Path(validation_dir)
        if not (folder / VALIDATION_NAME).is_file():
            raise UserError(
                f"no finished validation of the dataset: {VALIDATION_NAME} is missing",
                where=str(folder),
                fix=f"run validate_tmdb.py; if it stopped, see {FAILED_FOLDER}/{REJECTS_NAME} there",
            )
        info = read_json(folder / VALIDATION_NAME)
        try:
            table = pq.read_table(folder / ACCEPTED_NAME, columns=["row", "length", "label_tokens"])
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {ACCEPTED_NAME}: {error}", where=str(folder)) from error
        rows = table["row"].to_numpy().astype(np.int64)
        if len(rows) != info["accepted"]:
            raise UserError(
                f"{ACCEPTED_NAME} holds {len(rows)} records, {VALIDATION_NAME} says {info['accepted']}",
                where=str(folder),
                fix="run validate_tmdb.py again",
            )
        return cls(
            folder=folder,
            rows=rows,
            lengths=table["length"].to_numpy().astype(np.int32),
            label_tokens=table["label_tokens"].to_numpy().astype(np.int32),
            data_checksum=info["data_checksum"],
            n_records=info["records"],
            info=info,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> np.ndarray:
        """Another column of ``accepted.parquet``, read when asked for: object or numeric ``[n]``."""
        return pq.read_table(self.folder / ACCEPTED_NAME, columns=[name])[name].to_numpy(zero_copy_only=False)

    @cached_property
    def ids(self) -> np.ndarray:
        """Record ids, object ``[n]``."""
        return self.column("id")

    @cached_property
    def sources(self) -> np.ndarray:
        """Record sources, object ``[n]``."""
        return self.column("source")

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Index into ``self.rows`` of each given row, int64.

        Raises:
            UserError: a row is not accepted.
        """
        where = np.searchsorted(self.rows, rows)
        if (where >= len(self.rows)).any() or (self.rows[where] != rows).any():
            raise UserError("a row was asked for that the validation did not accept", where=str(self.folder))
        return where

    def check_store(self, store: RecordStore) -> None:
        """Raise UserError unless this validation is of the very file that ``store`` has open."""
        if store.sha256 != self.info["records_sha256"] or len(store) != self.n_records:
            raise UserError(
                "the validation belongs to other data than the dataset given",
                where=f"{self.folder} and {store.data_dir}",
                fix="run validate_tmdb.py for this dataset",
            )

    def check_processor(self, processor: Any, max_length: int) -> None:
        """Raise UserError unless the lengths were measured with this processor and ``max_length``."""
        measured = (self.info["processor"]["sha256"], self.info["max_length"])
        if measured != (processor_identity(processor)["sha256"], max_length):
            raise UserError(
                "the dataset was validated with another processor, image size or max_length "
                f"(max_length {measured[1]}, now {max_length})",
                where=str(self.folder),
                fix="run validate_tmdb.py with the same --model, --image-max-pixels and --max-length",
            )

    def groups(self) -> np.ndarray:
        """Group of each of the ``n_records`` rows, int64: rows that share an image share a group."""
        table = pq.read_table(self.folder / ACCEPTED_NAME, columns=["image_hashes"])
        lists = table["image_hashes"].combine_chunks()
        hashes = lists.flatten().to_numpy()
        owners = np.repeat(self.rows, np.diff(lists.offsets.to_numpy()))
        return connected_rows(self.n_records, owners, hashes)

    def split(
        self,
        mode: str = "lf_val_size",
        val_size: float = 0.05,
        split_seed: int = 42,
        train_size: int = 0,
        val_start: int | None = None,
    ) -> Split:
        """``split_rows`` over all records of the file, with the groups of shared images where the mode
        needs them."""
        groups = self.groups() if mode == "grouped" else None
        return split_rows(self.n_records, mode, val_size, split_seed, train_size, val_start, groups)

    def _kept(self, rows: np.ndarray, part: str, limit: int = 0) -> np.ndarray:
        accepted = np.zeros(self.n_records, dtype=bool)
        accepted[self.rows] = True
        kept = rows[accepted[rows]]
        if limit:
            kept = kept[:limit]
        if len(kept) == 0:
            raise UserError(f"the {part} part of the split holds no accepted record", where=str(self.folder))
        return kept

    def training_rows(self, split: Split) -> np.ndarray:
        """Accepted training rows in training order, cut to ``train_size``: int64."""
        return self._kept(split.train, "training", split.train_size)

    def validation_rows(self, split: Split) -> np.ndarray:
        """Accepted validation rows in validation order: int64."""
        return self._kept(split.validation, "validation")


def connected_rows(n_records: int, owners: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Group rows that share a hash, directly or through others: int64 ``[n_records]``.

    Args:
        owners: int64 ``[m]``, the row that holds each hash.
        hashes: ``[m]``.
    """
    parent = np.arange(n_records, dtype=np.int64)

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    for first, second in zip(owners[order[same]], owners[order[same + 1]], strict=True):
        a, b = root(int(first)), root(int(second))
        if a != b:
            parent[max(a, b)] = min(a, b)
    return np.array([root(row) for row in range(n_records)], dtype=np.int64)
