"""Which records are training and which are validation: a pure function of the number of records.

The split is drawn over ALL records of the file; rejected ones are taken out of each part afterwards
(``AcceptedSet.training_rows``), so that mending one record does not move the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..runtime.errors import UserError

SPLIT_MODES = ("lf_val_size", "prefix", "tail", "grouped")


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The two parts as row indices, in training order and in validation order.

    Attributes:
        train: int64 ``[n_train]``, every row that is not validation (``train_size`` is not applied yet).
        validation: int64 ``[n_validation]``.
        train_size: How many accepted rows of the head of ``train`` to use; 0 means all.
    """

    train: np.ndarray
    validation: np.ndarray
    n_records: int
    mode: str
    val_size: float
    split_seed: int
    train_size: int
    val_start: int | None = None

    def describe(self) -> dict[str, object]:
        """The settings and sizes, for a summary."""
        return {
            "mode": self.mode,
            "val_size": self.val_size,
            "split_seed": self.split_seed,
            "train_size": self.train_size,
            "val_start": self.val_start,
            "records": self.n_records,
            "train_records": len(self.train),
            "validation_records": len(self.validation),
        }


def validation_count(n_records: int, val_size: float) -> int:
    """``int(n * val_size)``, or ``val_size`` itself when it is above 1; at least 1.

    Raises:
        UserError: ``val_size`` is negative, or nothing would remain for training.
    """
    if not val_size >= 0:
        raise UserError(
            f"val_size is {val_size}, it must not be negative", fix="give a fraction or a number of records"
        )
    count = max(int(val_size) if val_size > 1 else int(n_records * val_size), 1)
    if count >= n_records:
        raise UserError(
            f"val_size {val_size} takes {count} of {n_records} records, none is left for training",
            fix="lower val_size, or build more records",
        )
    return count


def split_rows(
    n_records: int,
    mode: str = "lf_val_size",
    val_size: float = 0.05,
    split_seed: int = 42,
    train_size: int = 0,
    val_start: int | None = None,
    groups: np.ndarray | None = None,
) -> Split:
    """Split ``n_records`` rows.

    Modes:
        ``lf_val_size``: ``numpy.random.default_rng(split_seed).permutation(n)``; the first
        ``validation_count`` are validation, the rest training in that order. The published split.
        ``prefix``: training is the head of the file in file order, validation its last
        ``validation_count`` rows.
        ``tail``: validation is every row from ``val_start`` on, training the rows before it.
        ``grouped``: the published permutation, but rows with an equal entry in ``groups`` (int64
        ``[n_records]``) stay together: whole groups are taken in the order of the permutation until
        validation is full.

    Raises:
        UserError: a part would be empty, or an argument is out of range.
    """
    if train_size < 0:
        raise UserError(f"train_size is {train_size}, it must be 0 (all) or positive")
    if mode not in SPLIT_MODES:
        raise UserError(f"unknown split mode {mode!r}", fix=f"use one of {', '.join(SPLIT_MODES)}")
    rows = np.arange(n_records, dtype=np.int64)
    if mode == "tail" and val_start is not None:
        if not 0 < val_start < n_records:
            raise UserError(f"val_start is {val_start}, it must lie between 1 and {n_records - 1}")
        train, validation = rows[:val_start], rows[val_start:]
    else:
        count = validation_count(n_records, val_size)
        if mode in ("prefix", "tail"):
            train, validation = rows[: n_records - count], rows[n_records - count :]
        else:
            order = np.random.default_rng(split_seed).permutation(n_records).astype(np.int64)
            if mode == "grouped":
                train, validation = _by_groups(order, count, groups)
            else:
                train, validation = order[count:], order[:count]
    return Split(train, validation, n_records, mode, val_size, split_seed, train_size, val_start)


def _by_groups(order: np.ndarray, count: int, groups: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Whole groups, in the order in which the permutation first meets them, while they fit into ``count``."""
    if groups is None or len(groups) != len(order):
        raise UserError(
            "split mode grouped needs the group of every record", fix="validate the dataset first"
        )
    _, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    chosen = np.zeros(len(sizes), dtype=bool)
    met = np.zeros(len(sizes), dtype=bool)
    left = count
    for group in inverse[order]:
        if left == 0:
            break
        if not met[group]:
            met[group] = True
            if sizes[group] <= left:
                chosen[group] = True
                left -= sizes[group]
    in_validation = chosen[inverse[order]]
    if not in_validation.any():
        raise UserError(
            f"every group of records that share an image has more than {count} members",
            fix="raise val_size or use another split_mode",
        )
    return order[~in_validation], order[in_validation]
