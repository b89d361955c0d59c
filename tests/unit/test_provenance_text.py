"""Provenance as a person reads it."""

from __future__ import annotations

from odb_workflow.workflow.provenance_text import provenance_text

VERSIONS = {"python": "3.11.7", "torch": "2.14.1", "numpy": "2.4.6"}
TRAINING = {
    "command": "python train_accelerate.py --arm odb",
    "git": {"commit": "0123456789abcdef", "dirty": True},
    "versions": VERSIONS,
    "time": "2026-01-02T03:04:05+00:00",
    "config": {"device": "cuda"},
    "data": {"records_sha256": "f" * 64},
    "builder": {"kind": "git", "repo": "somewhere", "ref": "main", "commit": "abcdef", "sha256": "0" * 64},
    "base_model": {"path": "some/model"},
    "provenance": {"command": "python record_run.py", "git": {"commit": "0123456789abcdef", "dirty": True}},
}


def test_a_training_is_told_by_its_own_record() -> None:
    text = provenance_text({"outputs/x/odb/run_record.json": TRAINING})
    assert text.splitlines() == [
        "outputs/x/odb/run_record.json",
        "  made     2026-01-02T03:04:05+00:00",
        "  commit   0123456789 (with uncommitted changes)",
        "  device   cuda",
        "  data     records.jsonl sha256 ffffffffffff",
        "  builder  kind git, repo somewhere, ref main, commit abcdef",
        "  model    some/model",
        "  command  python train_accelerate.py --arm odb",
        "",
        "versions of all: python 3.11.7, torch 2.14.1",
        "",
        "./run.sh provenance --json shows the whole records",
    ]


def test_versions_that_differ_stand_with_their_records() -> None:
    other = {**TRAINING, "versions": {**VERSIONS, "torch": "2.11.0"}}
    text = provenance_text({"a": TRAINING, "b": other})
    assert "  versions python 3.11.7, torch 2.11.0" in text.splitlines()
    assert "versions of all" not in text


def test_nothing_yet() -> None:
    assert provenance_text({}) == "no result is there yet"
