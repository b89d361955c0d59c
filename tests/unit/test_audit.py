"""Each sample once: the account of an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from odb_workflow.runtime.errors import UserError
from odb_workflow.training.audit import audit_epoch, summarize

EXPECTED = np.arange(10, 17)


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_whole_epoch_with_one_padding_duplicate() -> None:
    audit = audit_epoch(0, EXPECTED, [rows(10, 12, 14, 16), rows(11, 13, 15, 10)], [10], finished=True)
    audit.check()
    assert (audit.expected, audit.distinct, audit.padding_duplicates, audit.missing) == (7, 7, 1, 0)
    assert summarize([audit, audit]) | {"epochs": 0, "ids_sha256": ""} == {
        "expected": 14,
        "distinct": 14,
        "padding_duplicates": 2,
        "missing": 0,
        "lost": 0,
        "doubled": 0,
        "ids_sha256": "",
        "complete": True,
        "epochs": 0,
    }


@pytest.mark.parametrize(
    ("emitted", "message"),
    [
        ([rows(10, 11, 12, 13, 14, 15)], "1 lost (rows 16)"),
        ([rows(10, 11, 12, 13, 14, 15, 16, 12)], "1 doubled (rows 12)"),
        ([rows(10, 11, 12, 13, 14, 15, 16, 10, 10)], "1 doubled (rows 10)"),  # one more than planned
        ([rows(10, 11, 12, 13, 14, 15, 16, 99)], "1 foreign (rows 99)"),
    ],
)
def test_a_fault_is_named(emitted: list[np.ndarray], message: str) -> None:
    audit = audit_epoch(2, EXPECTED, emitted, [10], finished=True)
    with pytest.raises(UserError, match=r"epoch 3 did not train on each sample once") as caught:
        audit.check()
    assert message in str(caught.value)
    assert not summarize([audit])["complete"]


def test_a_run_that_was_stopped_misses_but_loses_nothing() -> None:
    audit = audit_epoch(0, EXPECTED, [rows(10, 11)], [], finished=False)
    audit.check()
    assert (audit.missing, audit.lost) == (5, [])
    assert not summarize([audit])["complete"]


def test_hashes_tell_order_and_set_apart() -> None:
    first = audit_epoch(0, EXPECTED, [np.array(EXPECTED)], [], finished=True)
    turned = audit_epoch(0, EXPECTED, [np.array(EXPECTED[::-1])], [], finished=True)
    assert first.ids_sha256 != turned.ids_sha256
    assert first.set_sha256 == turned.set_sha256


def test_no_epoch_is_not_complete() -> None:
    assert not summarize([])["complete"]
