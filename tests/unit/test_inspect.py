"""Inspection: sound samples pass, each kind of broken sample is caught, the program's exit status says so."""

from __future__ import annotations

import sys
from pathlib import Path

import inspect_samples
import numpy as np
import pytest
import torch
from odb_workflow.processing.choose import rows_by_source, rows_of_ids
from odb_workflow.processing.inspect import check_sample, inspect_sample, pictures_of
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.tmdb.images import read_image
from odb_workflow.tmdb.pages import inspection_page
from odb_workflow.tmdb.store import RecordStore
from PIL import Image
from tmdb_helpers import cached_processor, record, write_tmdb


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    turns = [("human", "<image>a<image>"), ("gpt", "both <b>red</b>"), ("human", "why?"), ("gpt", "because")]
    records = [
        record(0, ["images/ok.png", "images/noise.png"], turns, source="two"),
        record(1, source="text"),
    ]
    records += [record(n, 1, source="one") for n in range(2, 9)]
    folder = write_tmdb(tmp_path / "d", records)
    noise = np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "images" / "noise.png")
    return RecordStore(folder)


@pytest.fixture
def samples(store: RecordStore, tiny_model_dir: Path) -> SampleProcessor:
    return SampleProcessor(cached_processor(tiny_model_dir), 4096, store.data_dir)


def test_sound_sample(store: RecordStore, samples: SampleProcessor) -> None:
    found = inspect_sample(samples, store[0], 0)
    assert found.problems == () and found.patches == 16 + 48 and found.image_tokens == 4 + 12
    labels = [piece.text for piece in found.pieces if piece.kind == "label"]
    assert labels == ["both <b>red</b><|im_end|>", "because<|im_end|>"]
    assert [piece.tokens for piece in found.pieces if piece.kind == "image"] == [4, 12]
    assert sum(piece.tokens for piece in found.pieces) == found.tokens
    text = inspect_sample(samples, store[1], 1)
    assert text.problems == () and text.pictures == () and text.image_tokens == 0


def test_pictures_come_back_from_the_tensor(store: RecordStore, samples: SampleProcessor) -> None:
    pictures = pictures_of(samples(store[0], 0), samples.vision)
    original = read_image(store.data_dir / "images" / "noise.png").image
    assert pictures[1].size == (128, 96)
    assert np.array_equal(np.asarray(pictures[1]), np.asarray(original))


def broken(kind: str, sample: dict) -> dict:
    image = sample["mm_token_type_ids"].nonzero()[0, 0]
    if kind == "label":
        sample["labels"][image] = sample["input_ids"][image]
    elif kind == "tensor":
        del sample["pixel_values"], sample["image_grid_thw"]
    elif kind == "empty":
        sample["pixel_values"] = sample["pixel_values"][:0]
    elif kind == "marks":
        sample["mm_token_type_ids"][image] = 0
    elif kind == "grid":
        sample["image_grid_thw"] = sample["image_grid_thw"][:1]
    elif kind == "tokens":
        sample["input_ids"][image], sample["mm_token_type_ids"][image] = 5, 0
    elif kind == "mute":
        sample["labels"][:] = -100
    elif kind == "shifted":
        sample["labels"] = torch.roll(sample["labels"], 1)
    return sample


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("label", "1 vision tokens carry a label"),
        ("tensor", "the record has 2 images, the sample has no vision tensor"),
        ("empty", "the sample has no vision tensor"),
        ("marks", "do not mark exactly"),
        ("grid", "1 grids of 16 patches, 64 rows"),
        ("tokens", "15 image tokens for 64 patches"),
        ("mute", "no token is supervised"),
        ("shifted", "labels differ"),
    ],
)
def test_broken_samples_are_caught(store, samples, kind: str, message: str) -> None:
    sample = broken(kind, samples(store[0], 0))
    problems = check_sample(sample, store[0], samples.image_token_id, 2)
    assert any(message in problem for problem in problems), problems


def test_vision_tensors_of_a_text_record_are_caught(store, samples) -> None:
    sample = samples(store[0], 0)
    assert any("no image" in problem for problem in check_sample(sample, store[1], samples.image_token_id, 2))


def test_choice_of_rows(store: RecordStore) -> None:
    groups = dict(rows_by_source(store, None, 3, 42))
    assert {name: len(rows) for name, rows in groups.items()} == {"one": 3, "text": 1, "two": 1}
    assert groups == dict(rows_by_source(store, None, 3, 42))
    assert rows_of_ids(store, None, ["r-00003", "r-00001"]) == [("one", [3]), ("text", [1])]
    with pytest.raises(UserError, match="no record has the id nope"):
        rows_of_ids(store, None, ["r-00003", "nope"])


def test_page_escapes_texts(store: RecordStore, samples: SampleProcessor) -> None:
    page = inspection_page("data", [("two", [inspect_sample(samples, store[0], 0)])], [])
    assert "both &lt;b&gt;red&lt;/b&gt;&lt;|im_end|&gt;</mark>" in page
    assert page.count('src="data:image/png;base64,') == 2 and "<script" not in page


def test_program_ends_with_status_1_where_a_sample_is_not_sound(
    store: RecordStore, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    command = ["inspect_samples.py", "--data", str(store.data_dir), "--model", str(tiny_model_dir)]
    monkeypatch.setattr(sys, "argv", [*command, "--output-dir", str(tmp_path / "o")])
    inspect_samples.main()
    shown = capsys.readouterr().out
    assert shown.count(" ok\n") == 5 and "r-00000" in shown
    (store.data_dir / "images" / "ok.png").write_bytes(b"")
    with pytest.raises(SystemExit) as status:
        run_main(inspect_samples.main)
    assert status.value.code == 1 and "broken_image: the file is empty" in capsys.readouterr().err
    assert (tmp_path / "o" / "samples.html").exists()
