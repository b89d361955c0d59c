"""Batch plan, sums, partial results, checkpoints: the parts of an evaluation that need no model."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from odb_workflow.evaluation.checkpoint import processor_fallback, resolve_checkpoint
from odb_workflow.evaluation.partial import PartialResults
from odb_workflow.evaluation.plan import batches_of_rank, plan_batches, remaining_batches
from odb_workflow.evaluation.publish import publish
from odb_workflow.evaluation.valloss import per_sample_rows, quantiles, summarize_losses
from odb_workflow.runtime.errors import UserError


def test_plan_by_hand():
    lengths = [5, 9, 2, 9, 4]
    assert plan_batches(lengths, 18) == [[1, 3], [0, 4, 2]]
    assert plan_batches(lengths, 18, packed=True) == [[1, 3], [0, 4, 2]]
    assert plan_batches(lengths, 14, packed=True) == [[1], [3, 0], [4, 2]]
    assert plan_batches(lengths, 14) == [[1], [3], [0, 4], [2]]
    assert plan_batches(lengths, 1) == [[1], [3], [0], [4], [2]]
    assert plan_batches(lengths, 100, max_samples=2) == [[1, 3], [0, 4], [2]]
    assert plan_batches([], 10) == []


@pytest.mark.parametrize("packed", [False, True])
def test_plan_keeps_each_sample_once_and_the_budget(packed: bool):
    draw = random.Random(1)
    lengths = [int(draw.lognormvariate(4, 1)) + 1 for _ in range(500)]
    batches = plan_batches(lengths, 700, packed=packed)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    for batch in batches:
        used = [lengths[index] for index in batch]
        area = sum(used) if packed else max(used) * len(used)
        assert len(batch) == 1 or area <= 700


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_the_batches_without_doubles(world_size: int):
    batches = plan_batches(list(range(1, 41)), 90)
    shared = [batches_of_rank(batches, rank, world_size) for rank in range(world_size)]
    assert sorted(batch for part in shared for batch in part) == sorted(batches)


def test_a_restart_leaves_unfinished_batches_whole():
    assert remaining_batches([[1, 3], [0, 4], [2]], {1, 3, 4}) == [[0], [2]]


def test_means_by_hand():
    values = {"a": [6.0, 3.0], "b": [1.0, 1.0], "c": [4.0, 4.0]}
    lines = per_sample_rows(["a", "b", "c"], [7, 2, 5], ["x", "y", "x"], values)
    assert lines[0] == {"id": "a", "row": 7, "source": "x", "label_tokens": 3, "loss": 2.0}
    results = summarize_losses(lines)
    assert results["eval_loss"] == pytest.approx(4 / 3)
    assert results["token_weighted_eval_loss"] == pytest.approx(11 / 8)
    assert (results["eval_samples"], results["label_tokens"]) == (3, 8)
    # sample variance of 2, 1, 1 is 1/3
    assert results["eval_loss_standard_error"] == pytest.approx(math.sqrt(1 / 3 / 3))
    assert results["per_source"]["x"]["eval_loss"] == 1.5
    assert results["per_source"]["x"]["token_weighted_eval_loss"] == pytest.approx(10 / 7)
    assert results["per_source"]["y"]["eval_loss_standard_error"] is None
    assert results["label_tokens_per_sample"] == {
        "min": 1,
        "p10": 1,
        "p50": 3,
        "p90": 4,
        "max": 4,
        "mean": 8 / 3,
    }


def test_means_do_not_depend_on_the_order_of_samples():
    draw = random.Random(3)
    values = {str(n): [draw.random() * 10, float(draw.randint(1, 50))] for n in range(300)}
    lines = per_sample_rows(list(values), range(300), ["s"] * 300, values)
    first = summarize_losses(lines)
    for _ in range(5):
        draw.shuffle(lines)
        assert summarize_losses(lines) == first


def test_a_sample_without_label_tokens_is_named():
    with pytest.raises(UserError, match="no label token") as caught:
        per_sample_rows(["lost"], [4], ["x"], {"lost": [0.0, 0.0]})
    assert "lost" in caught.value.where


def test_quantiles_of_one_value():
    assert quantiles([3]) == {"min": 3, "p10": 3, "p50": 3, "p90": 3, "max": 3, "mean": 3.0}


def test_partial_results_survive_a_torn_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    first = PartialResults(tmp_path, {"checkpoint_sha256": "1", "precision": "fp32"})
    assert first.prepare() == 1
    first.open(1, 0)
    first.append(["a", "b"], [[1.5, 2.0], [0.1, 1.0]])
    first.append(["c"], [[3.0, 1.0]])
    first.close()
    file = first.path / "launch-0001-rank-0.jsonl"
    file.write_bytes(file.read_bytes()[:-9])

    again = PartialResults(tmp_path, {"precision": "fp32", "checkpoint_sha256": "1"})
    assert again.prepare() == 2
    assert again.load() == {"a": [1.5, 2.0], "b": [0.1, 1.0]}

    other = PartialResults(tmp_path, {"checkpoint_sha256": "2", "precision": "fp32"})
    assert other.prepare() == 1 and other.load() == {}
    assert "left aside" in caplog.text and "(different: checkpoint_sha256)" in caplog.text
    other.remove()
    assert again.path.is_dir() and not other.path.exists()
    again.remove()
    assert not (tmp_path / "partial").exists()


def test_phases_of_one_evaluation_keep_their_values_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    for phase, value in (("", 1.0), ("close-calls", 2.0)):
        partial = PartialResults(tmp_path, {"checkpoint_sha256": "1"}, phase=phase)
        assert partial.prepare() == 1
        partial.open(1, 0)
        partial.append(["a"], [[value]])
        partial.close()
        assert partial.load() == {"a": [value]}
    assert "left aside" not in caplog.text, "the first phase is no other run"
    PartialResults(tmp_path, {"checkpoint_sha256": "1"}).remove()
    assert not (tmp_path / "partial").exists()


def test_results_appear_together_or_not_at_all(tmp_path: Path):
    publish(tmp_path, {"a.jsonl": [{"n": 1}], "b.json": {"x": 1.0}})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def broken():
        yield {"n": 2}
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        publish(tmp_path, {"b.json": {"x": 2.0}, "a.jsonl": broken()})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert json.loads(before["b.json"]) == {"x": 1.0}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "arm" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"_name_or_path": "base/model"}')
    (folder / "model.safetensors").write_bytes(b"1234")
    return folder


def record(model_dir: Path, **values: object) -> Path:
    content = {
        "format": 1,
        "model_dir": "checkpoint",
        "files": [{"path": "model.safetensors", "bytes": 4, "sha256": hashlib.sha256(b"1234").hexdigest()}],
        "sha256": "abc",
        "base_model": "embedded/base",
        "arm": "odb",
        "saved": True,
    }
    path = model_dir.parent / "checkpoint.json"
    path.write_text(json.dumps({**content, **values}))
    return path


def test_a_checkpoint_by_record_by_folder_and_by_its_arm(model_dir: Path):
    plain = resolve_checkpoint(str(model_dir))
    assert (plain.model_dir, plain.arm, plain.base_model) == (model_dir, None, "base/model")
    assert len(plain.sha256) == 64
    path = record(model_dir)
    for given in (path, path.parent):
        found = resolve_checkpoint(str(given))
        assert (found.model_dir, found.sha256, found.arm) == (model_dir, "abc", "odb")
        assert found.home == path.parent and found.base_model == "embedded/base"
    assert resolve_checkpoint(str(model_dir)).sha256 == "abc"
    assert resolve_checkpoint(str(model_dir)).home == model_dir


def test_the_identity_follows_the_files(model_dir: Path):
    before = resolve_checkpoint(str(model_dir)).sha256
    (model_dir / "eval_out").mkdir()
    (model_dir / "eval_out" / "eval_results.json").write_text("{}")
    assert resolve_checkpoint(str(model_dir)).sha256 == before
    (model_dir / "model.safetensors").write_bytes(b"1235")
    assert resolve_checkpoint(str(model_dir)).sha256 != before


def test_what_is_no_checkpoint(tmp_path: Path, model_dir: Path):
    with pytest.raises(UserError, match="the checkpoint does not exist"):
        resolve_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="cannot fetch the model from the Hub"):
        resolve_checkpoint("nobody/no-such-model")
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve_checkpoint(str(tmp_path))
    with pytest.raises(UserError, match="no model was saved") as caught:
        resolve_checkpoint(str(record(model_dir, saved=False)))
    assert "SAVE_FINAL_MODEL=1" in caught.value.fix
    with pytest.raises(UserError, match="has 4 bytes, the record says 5"):
        resolve_checkpoint(str(record(model_dir, files=[{"path": "model.safetensors", "bytes": 5}])))
    with pytest.raises(UserError, match=r"lacks second.safetensors"):
        resolve_checkpoint(str(record(model_dir, files=[{"path": "second.safetensors"}])))
    (model_dir / "model.safetensors").write_bytes(b"4321")
    with pytest.raises(UserError, match="does not have the checksum of the record"):
        resolve_checkpoint(str(record(model_dir)))
    path = record(model_dir)
    path.write_text('{"arm": "odb"}')
    with pytest.raises(UserError, match=r"not the checkpoint.json of a training"):
        resolve_checkpoint(str(path))
    (model_dir / "model.safetensors").unlink()
    path.unlink()
    with pytest.raises(UserError, match="no weights"):
        resolve_checkpoint(str(model_dir))
    (model_dir / "config.json").rename(model_dir / "adapter_config.json")
    with pytest.raises(UserError, match="an adapter"):
        resolve_checkpoint(str(model_dir))


def test_a_checkpoint_without_processor_takes_the_base_models(
    model_dir: Path, caplog: pytest.LogCaptureFixture
):
    checkpoint = resolve_checkpoint(str(record(model_dir)))
    assert processor_fallback(checkpoint, None) == "embedded/base"
    assert "the processor of embedded/base is used" in caplog.text
    assert processor_fallback(checkpoint, "given/base") == "given/base"
    (model_dir / "preprocessor_config.json").write_text("{}")
    (model_dir / "tokenizer.json").write_text("{}")
    assert processor_fallback(checkpoint, "given/base") is None
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer, and no base model is known"):
        processor_fallback(resolve_checkpoint(str(record(model_dir, base_model=None))), None)


@pytest.mark.parametrize(
    ("source", "revision"), [("given/base", "v1"), ("recorded/base", None), (None, None)]
)
def test_the_revision_of_a_base_model_is_that_of_its_processor(
    monkeypatch: pytest.MonkeyPatch, source: str | None, revision: str | None
):
    from odb_workflow.evaluation import session

    asked = {}
    monkeypatch.setattr(session, "load_processor", lambda name, *_, **rest: asked.update(rest, name=name))
    arguments = argparse.Namespace(
        base_model="given/base", base_model_revision="v1", image_max_pixels=0, trust_remote_code=False
    )
    opened = SimpleNamespace(
        ranks=SimpleNamespace(together=lambda load: load()),
        processor_source=source,
        checkpoint=SimpleNamespace(model_dir=Path("saved")),
    )
    session.load_session_processor(opened, arguments)
    assert (asked["name"], asked["revision"]) == (source or "saved", revision)
