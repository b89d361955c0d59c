"""Which records to show: some of each source, or those with given ids."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ..runtime.errors import UserError
from ..tmdb.accepted import AcceptedSet
from ..tmdb.records import check_record, parse_line
from ..tmdb.store import RecordStore

_BLOCK = 1024

Groups = list[tuple[str, list[int]]]


def _names(store: RecordStore, accepted: AcceptedSet | None) -> tuple[np.ndarray, list[str], list[str]]:
    """Rows int64 ``[n]`` with their sources and ids; lines that are no record are left out."""
    if accepted is not None:
        return accepted.rows, accepted.sources.tolist(), accepted.ids.tolist()
    rows, sources, ids = [], [], []
    for start in range(0, len(store), _BLOCK):
        for row, line in enumerate(store.read_lines(start, min(start + _BLOCK, len(store))), start):
            try:
                checked = check_record(parse_line(line))
            except ValueError:
                continue  # the validation reports broken lines; here only sources are asked for
            rows.append(row)
            sources.append(checked.source or "(none)")
            ids.append(checked.record_id or "")
    return np.array(rows, dtype=np.int64), sources, ids


def rows_by_source(store: RecordStore, accepted: AcceptedSet | None, per_source: int, seed: int) -> Groups:
    """``per_source`` rows of each source, drawn by ``seed``, in file order."""
    rows, sources, _ = _names(store, accepted)
    groups: dict[str, list[int]] = defaultdict(list)
    for row, source in zip(rows.tolist(), sources, strict=True):
        groups[source].append(row)
    random = np.random.default_rng(seed)
    return [
        (source, sorted(random.permutation(found)[:per_source].tolist()))
        for source, found in sorted(groups.items())
    ]


def rows_of_ids(store: RecordStore, accepted: AcceptedSet | None, ids: list[str]) -> Groups:
    """The rows with these ids, grouped by source.

    Raises:
        UserError: an id does not occur.
    """
    rows, sources, names = _names(store, accepted)
    wanted, found = set(ids), defaultdict(list)
    seen = set()
    for row, source, name in zip(rows.tolist(), sources, names, strict=True):
        if name in wanted:
            found[source].append(row)
            seen.add(name)
    if wanted - seen:
        missing = ", ".join(sorted(wanted - seen))
        raise UserError(f"no record has the id {missing}", where=str(store.path))
    return sorted(found.items())
