"""One pass over a dataset: every fault of every record, and the accepted set with its lengths.

Written to the output folder: ``accepted.parquet``, ``rejects.jsonl`` and, last, ``validation.json``. All
three are the same bytes for any number of processes. When the validation stops, ``validation_failed/`` in
the same folder holds ``rejects.jsonl`` and ``validation.json`` instead (Snakemake deletes declared outputs
of a failed job; that folder stays).

Policies: ``error`` stops on any rejected record after the whole pass; ``drop`` leaves them out as long as
they are at most ``max_bad_fraction`` of all. Broken JSON, missing or duplicate ids and paths that leave
the folder stop under both.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from ..processing.identity import processor_identity
from ..processing.sample import SampleProcessor
from ..runtime.errors import UserError
from ..runtime.files import atomic_open, atomic_write_json, atomic_write_text, dump_json
from ..runtime.provenance import package_versions
from .accepted import ACCEPTED_NAME, FAILED_FOLDER, REJECTS_NAME, VALIDATION_NAME
from .measure import Measured, Measurer
from .pages import data_report_page
from .pool import available_processes, ordered_map
from .records import REASONS, Fault, check_record, parse_line
from .report import build_stopped_report
from .store import RecordStore

logger = logging.getLogger(__name__)

POLICIES = ("error", "drop")
REPORT_NAME = "report.html"
CHUNK_ROWS = 64
_ROW_GROUP_ROWS = 8192
_NAMED_IN_MESSAGE = 50
_VERSIONS = ("torch", "torchvision", "transformers", "pillow")

_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("length", pa.int32()),
        ("label_tokens", pa.int32()),
        ("image_tokens", pa.int32()),
        ("patches", pa.int32()),
        ("image_widths", pa.list_(pa.int32())),
        ("image_heights", pa.list_(pa.int32())),
        ("image_hashes", pa.list_(pa.int64())),
        ("record_hash", pa.int64()),
        ("notes", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """What a finished validation found; ``info`` is the content of ``validation.json``."""

    folder: Path
    records: int
    accepted: int
    rejected: int
    info: dict[str, Any]


class _Bar(tqdm):
    monitor_interval = 0  # no thread of its own: workers are forked while the bar is open


class _Writer:
    """Takes measured records in row order; holds at most one row group in memory."""

    def __init__(self, store: RecordStore, parquet: Any, rejects: Any) -> None:
        self.store, self.rejects = store, rejects
        self.parquet = pq.ParquetWriter(parquet, _SCHEMA, compression="zstd")
        self.columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
        self.data_digest = hashlib.sha256(store.sha256.encode())
        self.accepted_digest = hashlib.sha256()
        self.rejected = np.zeros(len(store), dtype=bool)
        self.id_digests = np.zeros((len(store), 2), dtype=np.uint64)
        self.named: list[str] = []
        self.faults = 0
        self.reasons: Counter[str] = Counter()
        self.reason_rows: dict[str, int] = {}
        self.notes: Counter[str] = Counter()
        self.sources: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, measured: Measured) -> None:
        self.data_digest.update(measured.digest)
        if measured.record_id is not None:
            digest = hashlib.blake2b(measured.record_id.encode(), digest_size=16).digest()
            self.id_digests[measured.row] = np.frombuffer(digest, dtype=np.uint64)
        source = self.sources[measured.source or ""]
        source["records"] += 1
        if measured.faults:
            for fault in measured.faults:
                self.reject(measured.row, measured.record_id, measured.source, fault)
            return
        source["accepted"] += 1
        for name in ("length", "label_tokens", "image_tokens"):
            source[name] += getattr(measured, name)
        source["images"] += len(measured.sizes)
        self.notes.update(set(measured.notes))
        self.accepted_digest.update(f"{measured.row} {measured.length} {measured.label_tokens}\n".encode())
        values = (
            measured.row,
            measured.record_id,
            measured.source,
            measured.length,
            measured.label_tokens,
            measured.image_tokens,
            measured.patches,
            [width for width, _ in measured.sizes],
            [height for _, height in measured.sizes],
            measured.image_hashes,
            measured.record_hash,
            ",".join(sorted(set(measured.notes))),
        )
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        if len(self.columns["row"]) >= _ROW_GROUP_ROWS:
            self.flush()

    def reject(self, row: int, record_id: str | None, source: str | None, fault: Fault) -> None:
        line = self.store.line_number(row)
        self.rejects.write(
            dump_json(
                {
                    "row": row,
                    "line": line,
                    "id": record_id,
                    "source": source,
                    "reason": fault.reason,
                    "detail": fault.detail,
                    "file": fault.file,
                }
            )
            + "\n"
        )
        self.faults += 1
        self.reasons[fault.reason] += 1
        counts = self.sources[source or ""]
        counts[f"reason:{fault.reason}"] += 1
        if not self.rejected[row]:
            self.rejected[row] = True
            counts["rejected"] += 1
        if len(self.named) < _NAMED_IN_MESSAGE:
            name = repr(record_id) if record_id is not None else "a record without id"
            at = f" [{fault.file}]" if fault.file else ""
            self.named.append(f"{name} (line {line}): {fault.reason}: {fault.detail}{at}")

    def flush(self) -> None:
        if self.columns["row"]:
            self.parquet.write_table(pa.table(self.columns, schema=_SCHEMA))
            self.columns = {name: [] for name in _SCHEMA.names}

    def find_duplicate_ids(self) -> None:
        """Reject every record whose id stands more than once, naming all its lines."""
        present = np.flatnonzero(self.id_digests.any(axis=1))
        keys = np.ascontiguousarray(self.id_digests[present]).view("V16").ravel()
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        groups: dict[int, list[int]] = defaultdict(list)
        for position in np.flatnonzero(counts[inverse] > 1):
            groups[int(inverse[position])].append(int(present[position]))
        for rows in sorted(groups.values()):
            lines = " and ".join(str(self.store.line_number(row)) for row in rows[:10])
            more = f" and {len(rows) - 10} more" if len(rows) > 10 else ""
            for row in rows:
                checked = check_record(parse_line(self.store.read_lines(row, row + 1)[0]))
                fault = Fault("duplicate_id", f"the id stands on lines {lines}{more}")
                self.reject(row, checked.record_id, checked.source, fault)

    def source_table(self) -> dict[str, dict[str, Any]]:
        table = {}
        for name, counts in sorted(self.sources.items()):
            reasons = {key[7:]: number for key, number in sorted(counts.items()) if key.startswith("reason:")}
            keys = ("records", "accepted", "rejected", "length", "label_tokens", "image_tokens", "images")
            table[name or "(none)"] = {**{key: counts[key] for key in keys}, "reasons": reasons}
        return table


def validate_tmdb(
    data_dir: str | Path,
    processor: Any,
    *,
    max_length: int,
    output_dir: str | Path,
    on_bad_record: str = "error",
    max_bad_fraction: float = 0.05,
    processes: int | None = None,
    code_version: int = 1,
    progress: bool = True,
) -> ValidationResult:
    """Check every record of a dataset and measure its length.

    Args:
        data_dir: The dataset folder.
        processor: The model's processor as training uses it, ``image_max_pixels`` applied.
        max_length: Largest number of tokens of a sample.
        output_dir: Where the three files go.
        on_bad_record: ``error`` or ``drop``.
        max_bad_fraction: With ``drop``, the largest share of records that may be rejected.
        processes: Worker processes; None takes the CPUs this process may use.
        code_version: Recorded beside the result.
        progress: Show a progress bar on stderr.

    Raises:
        UserError: records that may not be dropped; names them and the file that lists every one.
    """
    if on_bad_record not in POLICIES:
        raise UserError(f"on_bad_record is {on_bad_record!r}", fix=f"use one of {', '.join(POLICIES)}")
    if not 0 <= max_bad_fraction <= 1:
        raise UserError(f"max_bad_fraction is {max_bad_fraction}, it must lie between 0 and 1")
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    failed = output_dir / FAILED_FOLDER
    for name in (VALIDATION_NAME, ACCEPTED_NAME, REJECTS_NAME):
        (output_dir / name).unlink(missing_ok=True)  # old results never stand beside new ones
    shutil.rmtree(failed, ignore_errors=True)
    store = RecordStore(data_dir)
    measurer = Measurer(SampleProcessor(processor, max_length, data_dir, check_template=True))
    parquet_part = output_dir / f".{ACCEPTED_NAME}.part"
    processes = processes or available_processes()
    try:
        with open(parquet_part, "wb") as parquet, atomic_open(output_dir / REJECTS_NAME) as rejects:
            writer = _Writer(store, parquet, rejects)
            for measured in _measure_all(store, measurer, processes, progress):
                writer.add(measured)
            writer.find_duplicate_ids()
            writer.flush()
            writer.parquet.close()
        info = _describe(store, writer, processor, max_length, on_bad_record, max_bad_fraction, code_version)
        problem = _problem(writer, len(store), on_bad_record, max_bad_fraction)
        if problem:
            failed.mkdir()
            os.replace(output_dir / REJECTS_NAME, failed / REJECTS_NAME)
            atomic_write_json(failed / VALIDATION_NAME, {**info, "stopped_because": problem})
            atomic_write_text(
                failed / REPORT_NAME, data_report_page(build_stopped_report(store.data_dir, failed))
            )
            raise _error(writer, problem, failed, on_bad_record)
        os.replace(parquet_part, output_dir / ACCEPTED_NAME)
    finally:
        parquet_part.unlink(missing_ok=True)
    atomic_write_json(output_dir / VALIDATION_NAME, info)
    rejected = info["rejected"]
    logger.info("%d records, %d accepted, %d rejected", len(store), info["accepted"], rejected)
    return ValidationResult(output_dir, len(store), info["accepted"], rejected, info)


def _measure_all(
    store: RecordStore, measurer: Measurer, processes: int, progress: bool
) -> Iterator[Measured]:
    def chunk(start: int) -> list[Measured]:
        stop = min(start + CHUNK_ROWS, len(store))
        return [measurer(line, row) for row, line in enumerate(store.read_lines(start, stop), start)]

    interval = 0.2 if sys.stderr.isatty() else 30
    with _Bar(
        total=len(store), unit="rec", desc="validate", disable=not progress, mininterval=interval
    ) as bar:
        for results in ordered_map(chunk, range(0, len(store), CHUNK_ROWS), processes):
            yield from results
            bar.update(len(results))


def _describe(
    store: RecordStore,
    writer: _Writer,
    processor: Any,
    max_length: int,
    on_bad_record: str,
    max_bad_fraction: float,
    code_version: int,
) -> dict[str, Any]:
    rejected = int(writer.rejected.sum())
    versions = package_versions()
    return {
        "records": len(store),
        "accepted": len(store) - rejected,
        "rejected": rejected,
        "faults": writer.faults,
        "rejected_by_reason": dict(sorted(writer.reasons.items())),
        "notes": dict(sorted(writer.notes.items())),
        "by_source": writer.source_table(),
        "data_checksum": writer.data_digest.hexdigest(),
        "records_sha256": store.sha256,
        "accepted_sha256": writer.accepted_digest.hexdigest(),
        "processor": processor_identity(processor),
        "max_length": max_length,
        "on_bad_record": on_bad_record,
        "max_bad_fraction": max_bad_fraction,
        "builder": store.metadata.get("builder"),
        "versions": {name: versions.get(name) for name in _VERSIONS},
        "code_version": code_version,
    }


def _problem(writer: _Writer, records: int, on_bad_record: str, max_bad_fraction: float) -> str | None:
    """Why the validation must stop, or None."""
    rejected = int(writer.rejected.sum())
    if rejected == 0:
        return None
    always = sorted(reason for reason in writer.reasons if REASONS[reason].always_stops)
    if always:
        return f"{rejected} of {records} records are at fault; {', '.join(always)} stop under every policy"
    if on_bad_record == "error":
        return f"{rejected} of {records} records are at fault"
    if rejected == records:
        return f"all {records} records are at fault"
    if rejected > max_bad_fraction * records:
        share = rejected / records
        limit = f"max_bad_fraction is {max_bad_fraction}"
        return f"{rejected} of {records} records ({share:.1%}) are at fault, {limit}"
    return None


def _error(writer: _Writer, problem: str, folder: Path, on_bad_record: str) -> UserError:
    lines = [problem, *(f"  - {line}" for line in writer.named)]
    if writer.faults > len(writer.named):
        lines.append(f"  - and {writer.faults - len(writer.named)} more faults")
    fixes = "; ".join(f"{reason}: {REASONS[reason].fix}" for reason, _ in writer.reasons.most_common(3))
    droppable = on_bad_record != "drop" and not any(REASONS[reason].always_stops for reason in writer.reasons)
    hint = ". Or set on_bad_record to drop to leave such records out" if droppable else ""
    return UserError(
        "\n".join(lines),
        where=f"{folder / REJECTS_NAME} lists all {writer.faults}, {REPORT_NAME} beside it shows them",
        fix=f"{fixes}{hint}",
    )
