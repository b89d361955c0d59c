"""The published split, the other modes, and the grouped split."""

from __future__ import annotations

import numpy as np
import pytest
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.accepted import connected_rows
from odb_workflow.tmdb.split import split_rows, validation_count


def test_published_split_of_mm_mix() -> None:
    split = split_rows(206_526, "lf_val_size", 0.05, 42)
    assert split.validation[:3].tolist() == [181883, 99794, 33835]
    assert len(split.validation) == 10_326 and len(split.train) == 196_200
    together = np.concatenate([split.validation, split.train])
    assert np.array_equal(np.sort(together), np.arange(206_526))
    order = np.random.default_rng(42).permutation(206_526)
    assert np.array_equal(split.train, order[10_326:])


@pytest.mark.parametrize(
    ("n_records", "val_size", "expected"),
    [(100, 0.05, 5), (10, 0.05, 1), (10, 0.0, 1), (1000, 7, 7), (1000, 7.9, 7), (19, 0.99, 18)],
)
def test_validation_count(n_records: int, val_size: float, expected: int) -> None:
    assert validation_count(n_records, val_size) == expected


@pytest.mark.parametrize(
    ("n_records", "val_size"), [(1, 0.05), (10, 1.0), (10, 10), (10, -0.1), (10, float("nan"))]
)
def test_no_training_left_is_an_error(n_records: int, val_size: float) -> None:
    with pytest.raises(UserError):
        split_rows(n_records, "lf_val_size", val_size)


def test_prefix_and_tail_are_in_file_order() -> None:
    prefix = split_rows(10, "prefix", 0.2, train_size=4)
    assert prefix.train.tolist() == list(range(8)) and prefix.validation.tolist() == [8, 9]
    assert prefix.train_size == 4
    tail = split_rows(10, "tail", 0.2, val_start=6)
    assert tail.train.tolist() == list(range(6)) and tail.validation.tolist() == [6, 7, 8, 9]
    assert split_rows(10, "tail", 0.2).validation.tolist() == [8, 9]
    for start in (0, 10, -1):
        with pytest.raises(UserError, match="val_start"):
            split_rows(10, "tail", 0.2, val_start=start)


def test_unknown_mode_and_negative_train_size() -> None:
    with pytest.raises(UserError, match="lf_val_size"):
        split_rows(10, "random")
    with pytest.raises(UserError, match="train_size"):
        split_rows(10, train_size=-1)


def test_connected_rows_joins_over_several_images() -> None:
    # rows 0 and 2 share image 11, rows 2 and 4 share image 22: one group; 1 and 3 stand alone
    owners = np.array([0, 1, 2, 2, 3, 4])
    hashes = np.array([11, 33, 11, 22, 44, 22])
    groups = connected_rows(6, owners, hashes)
    assert groups[0] == groups[2] == groups[4]
    assert len({int(groups[row]) for row in (0, 1, 3, 5)}) == 4


def test_grouped_split_never_parts_a_group() -> None:
    groups = np.random.default_rng(1).integers(0, 400, 1000)
    split = split_rows(1000, "grouped", 0.1, 42, groups=groups)
    assert len(split.validation) == 100 and len(split.train) == 900
    assert not set(groups[split.train]) & set(groups[split.validation])
    again = split_rows(1000, "grouped", 0.1, 42, groups=groups)
    assert np.array_equal(split.train, again.train)


def test_grouped_split_without_shared_images_is_the_published_one() -> None:
    grouped = split_rows(200, "grouped", 0.05, 42, groups=np.arange(200))
    published = split_rows(200, "lf_val_size", 0.05, 42)
    assert np.array_equal(grouped.train, published.train)
    assert np.array_equal(grouped.validation, published.validation)


def test_grouped_split_that_cannot_be_made() -> None:
    with pytest.raises(UserError, match="group"):
        split_rows(10, "grouped", 0.2, groups=np.zeros(10, dtype=int))
    with pytest.raises(UserError, match="validate"):
        split_rows(10, "grouped", 0.2)
