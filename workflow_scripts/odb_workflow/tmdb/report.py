"""The numbers of the data report: records and lengths by source, images, split, leaks, rejects."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ..runtime.errors import UserError
from ..runtime.files import iter_lines, read_json
from .accepted import ACCEPTED_NAME, FAILED_FOLDER, REJECTS_NAME, VALIDATION_NAME, AcceptedSet
from .records import REASONS
from .split import Split
from .store import RecordStore

_QUANTILES = (5, 25, 50, 75, 95, 99)
_BATCH_SIZES = (2, 4, 8, 16)
_SHOWN_REJECTS = 200
_SHOWN_LEAKS = 20
_BINS = 28


def quantities(values: np.ndarray) -> dict[str, Any]:
    """Count, sum, mean, standard deviation, coefficient of variation, extremes and quantiles."""
    if len(values) == 0:
        return {"count": 0, "sum": 0}
    mean, spread = float(values.mean()), float(values.std())
    quantiles = {f"p{q}": float(np.percentile(values, q)) for q in _QUANTILES}
    return {
        "count": len(values),
        "sum": int(values.sum()),
        "mean": mean,
        "std": spread,
        "cv": spread / mean if mean else None,
        "min": int(values.min()),
        "max": int(values.max()),
        **quantiles,
    }


def histogram(values: np.ndarray, edges: np.ndarray) -> list[int]:
    """Counts per bin ``[edges[i], edges[i + 1])``; the last bin includes its upper edge."""
    return np.histogram(values, bins=edges)[0].tolist()


def length_edges(lengths: np.ndarray) -> np.ndarray:
    """Whole-number bin edges, evenly spaced in the logarithm, float64 ``[bins + 1]``."""
    low, high = max(int(lengths.min()), 1), int(lengths.max()) + 1
    return np.unique(np.rint(np.geomspace(low, high, _BINS + 1)))


def random_batch_padding(lengths: np.ndarray, batch_size: int) -> float | None:
    """Share of padding when batches of this size are drawn at random (seed 0); None with too few samples."""
    count = len(lengths) // batch_size * batch_size
    if count == 0:
        return None
    batches = np.random.default_rng(0).permutation(lengths)[:count].reshape(-1, batch_size).astype(np.int64)
    return 1 - float(batches.sum()) / float(batches.max(axis=1).sum() * batch_size)


def _parts(accepted: AcceptedSet, split: Split) -> np.ndarray:
    """int8 ``[n accepted]``: 1 training, 2 validation, 0 neither (left out by ``train_size``)."""
    parts = np.zeros(len(accepted), dtype=np.int8)
    parts[accepted.positions(accepted.training_rows(split))] = 1
    parts[accepted.positions(accepted.validation_rows(split))] = 2
    return parts


def _sources(
    accepted: AcceptedSet, columns: dict[str, np.ndarray], parts: np.ndarray
) -> list[dict[str, Any]]:
    counted = accepted.info["by_source"]
    codes, names = _codes(accepted.sources)
    edges = length_edges(accepted.lengths)
    rows = []
    for name, counts in counted.items():
        mine = codes == names.get(name, -1)
        lengths = accepted.lengths[mine]
        total = int(lengths.sum())
        rows.append(
            {
                "source": name,
                "records": counts["records"],
                "accepted": counts["accepted"],
                "rejected": counts["rejected"],
                "training": int((parts[mine] == 1).sum()),
                "validation": int((parts[mine] == 2).sum()),
                "images": counts["images"],
                "lengths": quantities(lengths),
                "label_tokens": counts["label_tokens"],
                "label_share": counts["label_tokens"] / total if total else None,
                "image_share": int(columns["image_tokens"][mine].sum()) / total if total else None,
                "histogram": histogram(lengths, edges),
            }
        )
    return rows


def _codes(values: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
    unique, codes = np.unique(values.astype(str), return_inverse=True)
    return codes, {str(name): code for code, name in enumerate(unique)}


def _images(folder: Path) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Summary of sizes; hashes int64 ``[m]`` and the accepted position int64 ``[m]`` that holds each."""
    table = pq.read_table(folder / ACCEPTED_NAME, columns=["image_widths", "image_heights", "image_hashes"])
    lists = table["image_hashes"].combine_chunks()
    hashes = lists.flatten().to_numpy()
    owners = np.repeat(np.arange(len(lists)), np.diff(lists.offsets.to_numpy()))
    width = table["image_widths"].combine_chunks().flatten().to_numpy().astype(np.int64)
    height = table["image_heights"].combine_chunks().flatten().to_numpy().astype(np.int64)
    if len(hashes) == 0:
        return {"count": 0, "distinct": 0}, hashes, owners
    sizes, counts = np.unique(np.stack([width, height], axis=1), axis=0, return_counts=True)
    common = np.argsort(-counts, kind="stable")[:8]
    ratio = np.maximum(width, height) / np.minimum(width, height)
    summary = {
        "count": len(hashes),
        "distinct": len(np.unique(hashes)),
        "width": quantities(width),
        "height": quantities(height),
        "pixels": quantities(width * height),
        "largest_ratio": float(ratio.max()),
        "per_record_max": int(np.bincount(owners).max()),
        "common_sizes": [
            {"width": int(sizes[i][0]), "height": int(sizes[i][1]), "count": int(counts[i])} for i in common
        ],
    }
    return summary, hashes, owners


def _leaks(
    accepted: AcceptedSet, store: RecordStore, parts: np.ndarray, hashes: np.ndarray, owners: np.ndarray
) -> dict[str, Any]:
    """What stands in both training and validation: pictures by their pixels, whole records, ids."""
    shared = np.intersect1d(hashes[parts[owners] == 1], hashes[parts[owners] == 2])
    inside = np.isin(hashes, shared)
    touched = np.unique(owners[inside])
    records = accepted.column("record_hash")
    twins = np.intersect1d(records[parts == 1], records[parts == 2])
    ids = np.intersect1d(accepted.ids[parts == 1].astype(str), accepted.ids[parts == 2].astype(str))
    examples = []
    for value in shared[:_SHOWN_LEAKS]:
        places = owners[hashes == value]
        examples.append(
            {
                "training": _named(accepted, store, places[parts[places] == 1][:3], value, hashes, owners),
                "validation": _named(accepted, store, places[parts[places] == 2][:3], value, hashes, owners),
            }
        )
    validation = int((parts == 2).sum())
    affected = int((parts[touched] == 2).sum())
    return {
        "images": {
            "distinct": len(shared),
            "training_records": int((parts[touched] == 1).sum()),
            "validation_records": affected,
            "validation_share": affected / validation if validation else None,
            "examples": examples,
        },
        "identical_records": {
            "distinct": len(twins),
            "validation_records": int(np.isin(records[parts == 2], twins).sum()),
        },
        "ids": {"distinct": len(ids), "examples": ids[:_SHOWN_LEAKS].tolist()},
    }


def _named(
    accepted: AcceptedSet,
    store: RecordStore,
    places: np.ndarray,
    value: int,
    hashes: np.ndarray,
    owners: np.ndarray,
) -> list[dict[str, str]]:
    found = []
    for place in places:
        record = store[int(accepted.rows[place])]
        number = int(np.flatnonzero(hashes[owners == place] == value)[0])
        found.append({"id": record.id, "file": record.images[number]})
    return found


def read_rejects(path: Path) -> dict[str, Any]:
    """The rejects by reason and by image file, most frequent first, with meaning, fix and examples."""
    total: Counter[str] = Counter()
    shown: dict[str, list[dict[str, Any]]] = {}
    rows: set[int] = set()
    files: Counter[tuple[str, str]] = Counter()
    for _, line in iter_lines(path):
        reject = json.loads(line)
        reason = reject["reason"]
        total[reason] += 1
        rows.add(reject["row"])
        if reject["file"]:
            files[reject["file"], reason] += 1
        examples = shown.setdefault(reason, [])
        if len(examples) < _SHOWN_REJECTS:
            examples.append({key: reject[key] for key in ("id", "line", "source", "file", "detail")})
    return {
        "records": len(rows),
        "faults": sum(total.values()),
        "file_count": len(files),
        "files": [
            {"file": file, "reason": reason, "count": count, "fix": REASONS[reason].fix}
            for (file, reason), count in sorted(files.items(), key=lambda item: (-item[1], item[0]))
        ][:_SHOWN_REJECTS],
        "reasons": [
            {
                "reason": reason,
                "count": count,
                "meaning": REASONS[reason].meaning,
                "fix": REASONS[reason].fix,
                "always_stops": REASONS[reason].always_stops,
                "shown": shown[reason],
            }
            for reason, count in sorted(total.items(), key=lambda item: (-item[1], item[0]))
        ],
    }


def _header(info: dict[str, Any], data_dir: str | Path) -> dict[str, Any]:
    keys = ("records", "accepted", "rejected", "data_checksum", "max_length", "processor", "builder", "notes")
    policy = {key: info.get(key) for key in ("on_bad_record", "max_bad_fraction")}
    return {"data": str(data_dir), **{key: info.get(key) for key in keys}, **policy}


def build_report(
    store: RecordStore, validation_dir: str | Path, split_settings: dict[str, Any]
) -> dict[str, Any]:
    """All numbers of the data report.

    Args:
        store: The dataset.
        validation_dir: Output folder of ``validate_tmdb``.
        split_settings: Arguments of ``AcceptedSet.split``.

    Returns:
        ``status`` is ``passed``; or ``stopped``, with the rejects only, where the validation stopped.

    Raises:
        UserError: the folder holds no validation, or one of other data.
    """
    folder = Path(validation_dir)
    failed = folder / FAILED_FOLDER
    if not (folder / VALIDATION_NAME).is_file() and (failed / VALIDATION_NAME).is_file():
        return build_stopped_report(store.data_dir, failed)
    accepted = AcceptedSet.load(folder)
    accepted.check_store(store)
    split = accepted.split(**split_settings)
    parts = _parts(accepted, split)
    columns = {name: accepted.column(name) for name in ("image_tokens", "patches")}
    images, hashes, owners = _images(folder)
    lengths = accepted.lengths
    edges = length_edges(lengths)
    trained = lengths[parts == 1]
    return {
        "status": "passed",
        **_header(accepted.info, store.data_dir),
        "sources": _sources(accepted, columns, parts),
        "lengths": {
            **quantities(lengths),
            "edges": edges.tolist(),
            "histogram": histogram(lengths, edges),
            "training_cv": quantities(trained)["cv"],
            "random_batch_padding": {str(size): random_batch_padding(trained, size) for size in _BATCH_SIZES},
        },
        "label_tokens": int(accepted.label_tokens.sum(dtype=np.int64)),
        "label_share": float(accepted.label_tokens.sum(dtype=np.int64) / lengths.sum(dtype=np.int64)),
        "image_share": float(columns["image_tokens"].sum(dtype=np.int64) / lengths.sum(dtype=np.int64)),
        "images": images,
        "split": {
            **split.describe(),
            "training": int((parts == 1).sum()),
            "validation": int((parts == 2).sum()),
            "validation_label_tokens": int(accepted.label_tokens[parts == 2].sum(dtype=np.int64)),
        },
        "leaks": _leaks(accepted, store, parts, hashes, owners),
        "rejects": read_rejects(folder / REJECTS_NAME),
    }


def build_stopped_report(data_dir: str | Path, failed: Path) -> dict[str, Any]:
    """The report of a validation that stopped: counts by source and every kind of fault."""
    if not (failed / VALIDATION_NAME).is_file():
        raise UserError("no stopped validation to report on", where=str(failed))
    info = read_json(failed / VALIDATION_NAME)
    sources = [
        {"source": name, **{key: counts[key] for key in ("records", "accepted", "rejected", "images")}}
        for name, counts in info["by_source"].items()
    ]
    return {
        "status": "stopped",
        "stopped_because": info["stopped_because"],
        **_header(info, data_dir),
        "sources": sources,
        "rejects": read_rejects(failed / REJECTS_NAME),
    }
