"""prepare_model.py: makes the embedded model from a TMDB, checks a given one, names what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from odb_workflow.model.identity import check_remote_code, hub_model_identity, local_model_identity
from odb_workflow.runtime.errors import UserError
from prepare_model import PROMPT_TEXT, texts_of

PROGRAM = Path(__file__).resolve().parents[2] / "workflow_scripts" / "prepare_model.py"


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "models" / "Tiny-VL"))


def change_config(model: Path, **values: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_embedded_model_from_the_text_of_a_tmdb(tiny_tmdb: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--model", "embedded", "--data", str(tiny_tmdb)]
    done = subprocess.run([*command, "--output-dir", str(tmp_path / "run")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    identity = json.loads((tmp_path / "run" / "model.json").read_text())
    assert identity["path"] == "embedded" and identity["seed"] == 42
    assert str(tmp_path) not in json.dumps(identity)
    record = json.loads((tmp_path / "run" / "untrained" / "checkpoint.json").read_text())
    folder = (tmp_path / "run" / "untrained" / record["model_dir"]).resolve()
    assert folder == (tmp_path / "run" / "base_model").resolve()
    from transformers import AutoProcessor

    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    assert len(tokenizer.encode("what color is the shape?")) <= 7, "words of the data are single tokens"
    assert len({tokenizer.encode(letter)[0] for letter in "ABCDEFGH"}) == 8


def test_identity_depends_on_content_not_on_place(model: Path, tmp_path: Path) -> None:
    before = local_model_identity(model)
    assert local_model_identity(Path(shutil.copytree(model, tmp_path / "elsewhere"))) == before
    assert before["weights"][0]["path"] == "model.safetensors"
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)
    assert local_model_identity(model) != before


def test_a_missing_folder_names_the_nearest_one(model: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean .*Tiny-VL\?"):
        local_model_identity(model.with_name("TinyVL"))
    with pytest.raises(UserError, match="does not exist"):
        local_model_identity(model / "no" / "such" / "place")


def test_faults_of_a_model_are_listed_together(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model.safetensors.part")
    (model / "processor_config.json").unlink()
    change_config(model, model_type="llama", vision_config=None)
    with pytest.raises(UserError) as failed:
        local_model_identity(model)
    for part in (
        "no weights",
        "no image processor",
        "'llama' is no image-text-to-text model",
        "ODB_MM_MIX_MODEL",
    ):
        assert part in str(failed.value)


def test_a_model_that_sees_but_does_not_speak_is_refused(model: Path) -> None:
    change_config(model, model_type="clip")
    with pytest.raises(UserError, match="'clip' is no image-text-to-text model"):
        local_model_identity(model)


def test_missing_shards_and_pointers_of_git_lfs(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UserError) as failed:
        local_model_identity(model)
    assert "missing: model-00002-of-00002.safetensors" in str(failed.value)
    assert "git lfs pull" in str(failed.value)


def test_code_that_comes_with_a_model_needs_permission(model: Path) -> None:
    change_config(model, model_type="own_vlm", auto_map={"AutoModelForImageTextToText": "code.Own"})
    assert local_model_identity(model)["model_type"] == "own_vlm"
    with pytest.raises(UserError, match="trust_remote_code: true"):
        check_remote_code(model / "config.json", False, str(model))
    check_remote_code(model / "config.json", True, str(model))


def test_a_hub_model_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be fetched(.|\n)*local folder"):
        hub_model_identity("nobody-here/no-such-model", None)


def test_the_program_ends_with_one_message(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--output-dir", str(tmp_path / "run")]
    for more, message in (
        (["--model", str(tmp_path / "none")], "does not exist"),
        (["--model", "embedded"], "needs --data"),
        (["--model", "embedded", "--data", str(tmp_path)], "no TMDB"),
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model.json").exists()


def test_broken_records_are_left_to_the_validation(tmp_path: Path) -> None:
    lines = [
        '{"conversations": 5}',
        '{"conversations": [["human", "q"]]}',
        '{"id": ' + "[" * 100_000,
        "null",
        "not json",
        '{"conversations": [{"from": "gpt", "value": "half \\ud800 pair"}, {"from": "gpt", "value": 7}]}',
        '{"conversation": [{"from": "human", "value": "<image>what?"}]}',
    ]
    (tmp_path / "records.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    assert list(texts_of(tmp_path)) == ["half  pair", "what?", PROMPT_TEXT]
