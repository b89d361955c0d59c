"""Each sample once: what was trained on is compared with what the epoch had to emit.

Rows are noted where the optimizer step happens, not where a loader emits them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .agreement import AllRanksError

SHOWN = 20


@dataclass
class EpochAudit:
    """The account of one epoch over all ranks.

    Attributes:
        expected: samples that the epoch had to emit, each once.
        distinct: of these, how many were trained on.
        padding_duplicates: second emissions that were planned, so that all ranks get equally many samples.
        missing: ``expected - distinct``; above 0 only where the run was stopped on purpose (``finished`` is
        False). lost: rows of a finished epoch that were never trained on.
        doubled: rows that were trained on more often than planned.
        foreign: rows that do not belong to the epoch.
        ids_sha256: SHA-256 over the rows in the order of training, rank after rank.
        set_sha256: SHA-256 over the distinct rows in ascending order; equal for arms that saw the same
        samples.
    """

    epoch: int
    expected: int
    distinct: int
    padding_duplicates: int
    missing: int
    ids_sha256: str
    set_sha256: str
    finished: bool
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)

    def check(self) -> None:
        """Raise an error, on all ranks, where a sample was lost, doubled or does not belong to the epoch."""
        if not (self.lost or self.doubled or self.foreign):
            return
        parts = [
            f"{len(rows)} {name} (rows {', '.join(map(str, rows[:SHOWN]))})"
            for name, rows in (("lost", self.lost), ("doubled", self.doubled), ("foreign", self.foreign))
            if rows
        ]
        raise AllRanksError(
            f"epoch {self.epoch + 1} did not train on each sample once: {'; '.join(parts)}",
            where=f"{self.distinct} of {self.expected} samples were trained on",
            fix="the loader is at fault; with odb leave --join on, and report the settings of this run",
        )


def audit_epoch(
    epoch: int,
    expected: np.ndarray,
    emitted_per_rank: Sequence[np.ndarray],
    planned_duplicates: Iterable[int],
    finished: bool,
) -> EpochAudit:
    """Compare what an epoch emitted with what it had to emit.

    Args:
        expected: int64 [n], rows of the epoch, each once.
        emitted_per_rank: rows in the order of training, one array per rank.
        planned_duplicates: rows that may appear once more, with repetitions.
        finished: whether the epoch ran to its end; otherwise what is missing is not an error.
    """
    emitted = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in emitted_per_rank])
    rows, counts = np.unique(emitted, return_counts=True)
    wanted = np.unique(expected)
    allowed = Counter(int(row) for row in planned_duplicates)
    known = np.isin(rows, wanted)
    extra = {
        int(row): int(count) - 1 for row, count in zip(rows[known], counts[known], strict=True) if count > 1
    }
    doubled = sorted(row for row, count in extra.items() if count > allowed[row])
    missing = np.setdiff1d(wanted, rows)
    digest = hashlib.sha256()
    for one_rank in emitted_per_rank:
        digest.update(np.asarray(one_rank, dtype="<i8").tobytes() + b"|")
    return EpochAudit(
        epoch=epoch,
        expected=len(wanted),
        distinct=int(known.sum()),
        padding_duplicates=sum(min(count, allowed[row]) for row, count in extra.items()),
        missing=len(missing),
        ids_sha256=digest.hexdigest(),
        set_sha256=hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest(),
        finished=finished,
        lost=missing.tolist() if finished else [],
        doubled=doubled,
        foreign=rows[~known].tolist(),
    )


def summarize(audits: Sequence[EpochAudit]) -> dict[str, Any]:
    """The account of a whole run: sums over epochs, and ``complete``."""
    digest = hashlib.sha256("".join(audit.ids_sha256 for audit in audits).encode()).hexdigest()
    return {
        "expected": sum(audit.expected for audit in audits),
        "distinct": sum(audit.distinct for audit in audits),
        "padding_duplicates": sum(audit.padding_duplicates for audit in audits),
        "missing": sum(audit.missing for audit in audits),
        "lost": sum(len(audit.lost) for audit in audits),
        "doubled": sum(len(audit.doubled) for audit in audits),
        "ids_sha256": digest,
        "complete": bool(audits)
        and all(not (audit.missing or audit.lost or audit.doubled or audit.foreign) for audit in audits),
        "epochs": [
            {**asdict(audit), **{key: getattr(audit, key)[:SHOWN] for key in ("lost", "doubled", "foreign")}}
            for audit in audits
        ],
    }
