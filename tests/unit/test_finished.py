"""A finished training is published again only where it is this very training and whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from odb_workflow.training.finished import FINISHED_NAME, keep_finished, publish_finished
from odb_workflow.training.output import begin_training, write_checkpoint_record

PARTS = {"arguments": {"lr": 1e-3}, "code_version": 1, "rows": (1, 2)}
DECLARED = ["train_summary_odb.json", "step_log.jsonl", "checkpoint.json"]


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """The folder of a training that ended, whose outputs Snakemake has deleted."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/model.safetensors").write_bytes(b"weights")
    for name in DECLARED[:2]:
        (tmp_path / name).write_text(name)
    write_checkpoint_record(tmp_path, "odb", "base", saved=True)
    keep_finished(tmp_path, DECLARED, PARTS)
    for name in DECLARED:
        (tmp_path / name).unlink()
    return tmp_path


def test_its_files_are_put_back(ended: Path) -> None:
    assert publish_finished(ended, PARTS, saved=True)
    assert [(ended / name).read_text() for name in DECLARED[:2]] == DECLARED[:2]
    assert json.loads((ended / "checkpoint.json").read_text())["saved"] is True
    assert not list(ended.glob(".*.part"))


def damaged(folder: Path) -> None:
    (folder / "checkpoint/model.safetensors").write_bytes(b"Weights")


def gone(folder: Path) -> None:
    (folder / "checkpoint/model.safetensors").unlink()


def not_saved(folder: Path) -> None:
    record = folder / FINISHED_NAME / "checkpoint.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"saved": False, "files": []}))


def unreadable(folder: Path) -> None:
    (folder / FINISHED_NAME / "fingerprint.json").write_text("{")


def there(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("{}")


def begun_again(folder: Path) -> None:
    begin_training(folder, "base", "odb")
    assert not (folder / FINISHED_NAME).exists()


@pytest.mark.parametrize("change", [damaged, gone, not_saved, unreadable, there, begun_again])
def test_what_is_not_whole_is_trained(ended: Path, change: Callable[[Path], None]) -> None:
    change(ended)
    assert not publish_finished(ended, PARTS, saved=True)
    assert not (ended / "step_log.jsonl").exists()


@pytest.mark.parametrize("other", [{"arguments": {"lr": 2e-3}}, {"code_version": 2}])
def test_another_training_is_trained(ended: Path, other: dict) -> None:
    assert not publish_finished(ended, PARTS | other, saved=True)
    assert publish_finished(ended, PARTS, saved=False)
