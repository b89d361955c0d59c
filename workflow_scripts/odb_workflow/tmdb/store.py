"""Random access to ``records.jsonl`` by an offset index.

The index is built once, lies beside the file, and is checked against the file's size and modification time
at each opening. Only offsets are held in memory (8 bytes a record); a record is read with ``pread`` when
asked for, so one open store serves any number of forked workers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.errors import UserError
from ..runtime.files import atomic_open, read_json
from .records import Record, record_from_line

logger = logging.getLogger(__name__)

RECORDS_NAME = "records.jsonl"
METADATA_NAME = "metadata.json"
INDEX_NAME = ".records.idx"
_INDEX_FORMAT = 1
_CHUNK_BYTES = 1 << 22
_BOM = b"\xef\xbb\xbf"


def _stamp(status: os.stat_result) -> dict[str, int]:
    return {"format": _INDEX_FORMAT, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _scan(path: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """Offsets int64 ``[n+1]`` (last: end of file), 1-based line numbers int64 ``[n]``, SHA-256 of the file.

    A line is what stands between two ``\\n``; lines of white space alone are no records.
    """
    digest = hashlib.sha256()
    ends: list[np.ndarray] = []
    position = 0
    with open(path, "rb") as handle:
        head = handle.read(3)
        handle.seek(0)
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
            found = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10)
            ends.append(found.astype(np.int64) + (position + 1))
            position += len(chunk)
        all_ends = np.concatenate([*ends, np.array([position], dtype=np.int64)])
        if len(all_ends) > 1 and all_ends[-2] == position:
            all_ends = all_ends[:-1]
        starts = np.concatenate([np.zeros(1, dtype=np.int64), all_ends[:-1]])
        if head == _BOM:
            starts[0] = 3
        sizes = all_ends - starts
        keep = sizes > 0
        for line in np.flatnonzero(sizes <= 64):  # no record is that short: look whether the line is empty
            handle.seek(starts[line])
            if not handle.read(int(sizes[line])).strip(b" \t\r\n"):
                keep[line] = False
    # An empty line stays part of the record before it; reading strips it off again.
    offsets = np.concatenate([starts[keep], np.array([position], dtype=np.int64)])
    return offsets, np.flatnonzero(keep) + 1, digest.hexdigest()


class RecordStore:
    """The records of one dataset folder, by row.

    Args:
        data_dir: Folder with ``metadata.json`` and ``records.jsonl``.

    Raises:
        UserError: a file is missing, the file is empty, or ``num_records`` differs from the records found.
    """

    def __init__(self, data_dir: str | Path) -> None:
        self.data_dir = Path(data_dir)
        self.path = self.data_dir / RECORDS_NAME
        if not self.data_dir.is_dir():
            raise UserError(
                "the dataset folder does not exist", where=str(data_dir), fix="build the dataset first"
            )
        metadata_path = self.data_dir / METADATA_NAME
        if not metadata_path.is_file():
            raise UserError(
                f"{METADATA_NAME} is missing: the build did not finish",
                where=str(data_dir),
                fix="build it again",
            )
        self.metadata: dict[str, Any] = read_json(metadata_path)
        try:
            # without O_NONBLOCK a pipe would be waited for
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(f"cannot open the records: {error.strerror}", where=str(self.path)) from error
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise UserError(
                f"{RECORDS_NAME} is not a regular file",
                where=str(self.path),
                fix="put a file with one record a line there",
            )
        self._load_index()
        declared = self.metadata.get("num_records") if isinstance(self.metadata, dict) else None
        if isinstance(declared, bool) or declared != len(self):  # true equals 1
            raise UserError(
                f"{METADATA_NAME} says num_records {declared}, {RECORDS_NAME} holds {len(self)} records",
                where=str(self.data_dir),
                fix="build the dataset again; one of the two files was changed",
            )
        if len(self) == 0:
            raise UserError(
                "the dataset has no records", where=str(self.path), fix="check the builder's sizes"
            )

    def _load_index(self) -> None:
        index_path = self.data_dir / INDEX_NAME
        status = os.fstat(self._descriptor)
        header = self._read_index(index_path, _stamp(status))
        if header is None:
            offsets, lines, sha256 = _scan(self.path)
            header = {**_stamp(status), "records": len(lines), "sha256": sha256}
            self._offsets, self._lines = offsets, lines
            try:
                with atomic_open(index_path, "wb") as handle:
                    handle.write(json.dumps(header).encode() + b"\n")
                    handle.write(offsets.astype("<i8").tobytes() + lines.astype("<i8").tobytes())
            except OSError as error:
                logger.warning("the offset index is kept in memory only: %s: %s", index_path, error.strerror)
        #: SHA-256 of ``records.jsonl``.
        self.sha256: str = header["sha256"]

    def _read_index(self, path: Path, stamp: dict[str, int]) -> dict[str, Any] | None:
        """The header of a sound index that fits the file, else None; sets offsets and line numbers."""
        try:
            with open(path, "rb") as handle:
                header = json.loads(handle.readline(4096))
                body = np.frombuffer(handle.read(), dtype="<i8")
        except (OSError, ValueError):
            return None
        if not isinstance(header, dict) or any(header.get(key) != value for key, value in stamp.items()):
            return None
        count = header.get("records")
        if not isinstance(count, int) or len(body) != 2 * count + 1 or "sha256" not in header:
            return None
        offsets, lines = body[: count + 1], body[count + 1 :]
        if offsets[-1] != stamp["bytes"] or (np.diff(offsets) <= 0).any():
            return None
        self._offsets, self._lines = offsets, lines
        return header

    def __len__(self) -> int:
        return len(self._lines)

    def line_number(self, row: int) -> int:
        """1-based line of the record in ``records.jsonl``."""
        return int(self._lines[row])

    def read_lines(self, start: int, stop: int) -> list[bytes]:
        """The raw lines of rows ``start`` to ``stop - 1`` in one read, without their line ends."""
        first, last = int(self._offsets[start]), int(self._offsets[stop])
        block = self._pread(first, last - first)
        cuts = (self._offsets[start : stop + 1] - first).tolist()
        return [block[a:b].strip(b" \t\r\n") for a, b in itertools.pairwise(cuts)]

    def _pread(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            part = os.pread(self._descriptor, size, offset)
            if not part:
                raise UserError("the records file became shorter while it was read", where=str(self.path))
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __getitem__(self, row: int) -> Record:
        """The record of a row.

        Raises:
            IndexError: no such row.
            BadRecord: the record's form is at fault.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} records")
        return record_from_line(self.read_lines(row, row + 1)[0], row)

    def __reduce__(self):
        # A started process opens the folder itself; records and offsets never travel.
        return RecordStore, (self.data_dir,)

    def close(self) -> None:
        """Close the file; the store cannot be read afterwards."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()
