"""The form of a record: what is accepted, what is a fault, and that all faults are found at once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from odb_workflow.tmdb.records import (
    REASONS,
    BadRecord,
    check_record,
    normalize_id,
    parse_line,
    record_from_line,
)
from tmdb_helpers import record


def reasons(value: dict) -> list[str]:
    return [fault.reason for fault in check_record(value).faults]


def test_sound_record() -> None:
    checked = check_record(record(3, 2))
    assert checked.faults == [] and checked.record.id == "r-00003"
    assert checked.record.images == ("images/ok.png", "images/ok.png")
    assert [turn.role for turn in checked.record.turns] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, "7"),
        ("7", "7"),
        (-3, "-3"),
        ("a/b", "a/b"),
        ("", None),
        ("  ", None),
        (None, None),
        (True, None),
        (1.0, None),
        (["x"], None),
        ("\ud800", None),
        ("x" * 1025, None),
    ],
)
def test_ids(value, expected) -> None:
    assert normalize_id(value) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"id": None}, ["missing_id"]),
        ({"source": ""}, ["missing_source"]),
        ({"source": 3}, ["missing_source"]),
        ({"images": "images/ok.png"}, ["bad_images"]),
        ({"images": [None]}, ["bad_images"]),
        ({"images": [""]}, ["bad_images"]),
        ({"images": None}, []),
        ({"conversations": None}, ["bad_conversation"]),
        ({"conversations": {"from": "human"}}, ["bad_conversation"]),
        ({"conversation": []}, ["bad_conversation"]),
        ({"conversations": ["hello"]}, ["bad_turn", "no_answer"]),
        ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "a"}]}, ["bad_turn"]),
        ({"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": "a"}]}, ["bad_turn"]),
        ({"conversations": [{"from": None, "value": "q"}, {"from": "gpt", "value": "a"}]}, ["bad_turn"]),
    ],
)
def test_broken_fields(change: dict, expected: list[str]) -> None:
    assert reasons({**record(), **change}) == expected


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([("human", "q"), ("gpt", "a <image>")], ["placeholder_outside_human"]),
        ([("system", "<image>"), ("human", "q"), ("gpt", "a")], ["placeholder_outside_human"]),
        ([("human", "q"), ("gpt", "\u3000\n")], ["empty_answer"]),
        ([("Human", "q"), ("gpt", "a")], ["unknown_role"]),
        ([("human", "half \ud83d"), ("gpt", "a")], ["bad_text"]),
        ([("human", "q"), ("system", "s"), ("gpt", "a")], ["system_not_first"]),
        ([("gpt", "a")], []),
    ],
)
def test_turns(turns, expected: list[str]) -> None:
    assert reasons(record(turns=turns)) == expected


def test_all_faults_of_one_record_are_found_at_once() -> None:
    value = record(0, ["a.png", "b.png"], [("human", "<image>"), ("tool", "x"), ("gpt", "")], source=None)
    assert reasons(value) == ["missing_source", "unknown_role", "empty_answer", "placeholder_count"]


def test_old_key_conversation_is_read() -> None:
    value = record()
    value["conversation"] = value.pop("conversations")
    assert reasons(value) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "Expecting value"),
        (b"[1]", "list, not an object"),
        (b'{"id": "a", "id": "b"}', "'id' stands twice"),
        (b'{"id": "a", "x": {"k": 1, "k": 2}}', "'k' stands twice"),
        (b'{"id": NaN}', "NaN"),
        (b'{"id": "a", "x": ' + b"9" * 5000 + b"}", "^a number has too many digits$"),
        (b"{" + b",".join(b'"%d": 0' % (key % 100_000) for key in range(100_001)) + b"}", "'0' stands twice"),
        (b'{"id": "caf\xe9"}', "not UTF-8 at byte 11"),
        (b'{"id": "a"', "delimiter"),
        (b'{"id": "a"} {"id": "b"}', "Extra data"),
        (b'{"id": "a\nb"}', "control character"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_lines(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_line(line)


def test_record_from_line_names_row_id_and_fix() -> None:
    with pytest.raises(BadRecord) as caught:
        record_from_line(json.dumps(record(5, turns=[("human", "q")])).encode(), 17)
    assert (caught.value.reason, caught.value.record_id, caught.value.row) == ("no_answer", "r-00005", 17)
    assert "r-00005" in str(caught.value) and "row 17" in str(caught.value) and "fix:" in str(caught.value)


def test_bad_record_travels_between_processes_and_through_the_loader() -> None:
    error = BadRecord("broken_image", record_id="x", row=3, detail="cut", file="a.jpg")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.file == "a.jpg"
    assert "boom" in str(BadRecord("boom"))  # DataLoader builds it anew from one string


def test_every_reason_says_how_to_mend() -> None:
    assert all(reason.meaning and reason.fix for reason in REASONS.values())
    stops = {name for name, reason in REASONS.items() if reason.always_stops}
    assert stops == {"broken_json", "missing_id", "duplicate_id", "path_outside"}


def test_every_reason_stands_in_the_documentation(repository: Path) -> None:
    page = (repository / "docs" / "data-rules.md").read_text(encoding="utf-8")
    for name, reason in REASONS.items():
        mark = "**" if reason.always_stops else ""
        assert f"| {mark}`{name}`{mark} | {reason.meaning} | {reason.fix} |" in page
