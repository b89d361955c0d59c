"""The length rule of samples: what is cut, what is refused, and that enormous texts follow the same rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.records import BadRecord, Record
from PIL import Image
from tmdb_helpers import cached_processor
from tmdb_helpers import parsed_record as make


@pytest.fixture
def processor(tiny_model_dir: Path):
    return cached_processor(tiny_model_dir)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.effect_noise((64, 64), 80).convert("RGB").save(tmp_path / "a.png")
    return tmp_path


def length_of(processor, folder: Path, record: Record) -> int:
    return len(SampleProcessor(processor, 100_000, folder)(record, 0)["input_ids"])


def test_exact_limit_and_one_less(processor, folder: Path) -> None:
    record = make(("user", "<image>q"), ("assistant", "one two three four five"), images=("a.png",))
    whole = SampleProcessor(processor, 100_000, folder)(record, 0)
    length = len(whole["input_ids"])
    assert len(SampleProcessor(processor, length, folder)(record, 0)["input_ids"]) == length
    cut = SampleProcessor(processor, length - 3, folder)(record, 0)
    for key in ("input_ids", "labels", "mm_token_type_ids", "attention_mask"):
        assert torch.equal(cut[key], whole[key][: length - 3])
    assert torch.equal(cut["pixel_values"], whole["pixel_values"])


def test_never_cut_inside_or_before_an_image(processor, folder: Path) -> None:
    record = make(
        ("user", "q"), ("assistant", "answer"), ("user", "<image>"), ("assistant", "b"), images=("a.png",)
    )
    whole = SampleProcessor(processor, 100_000, folder)(record, 0)
    last = int(whole["mm_token_type_ids"].nonzero().max()) + 1  # the vision end token follows it
    for limit in range(last - 8, last + 1):
        with pytest.raises(BadRecord, match="reach into an image"):
            SampleProcessor(processor, limit, folder)(record, 0)
    cut = SampleProcessor(processor, last + 1, folder)(record, 0)
    assert int(cut["mm_token_type_ids"].sum()) == int(whole["mm_token_type_ids"].sum())


def test_never_without_a_label_token(processor, folder: Path) -> None:
    record = make(("user", "long question " * 20), ("assistant", "answer"))
    whole = SampleProcessor(processor, 100_000, folder)(record, 0)
    first = int((whole["labels"] != -100).nonzero().min())
    with pytest.raises(BadRecord) as caught:
        SampleProcessor(processor, first, folder)(record, 0)
    assert caught.value.reason == "over_length"
    assert f"{len(whole['input_ids'])} tokens" in caught.value.detail
    assert int((SampleProcessor(processor, first + 1, folder)(record, 0)["labels"] != -100).sum()) == 1


@pytest.mark.parametrize("between", ["\n", "\r\n\n", "。", "，\n", "   ", " \n \n"])
def test_an_enormous_text_may_be_cut_after_any_word(processor, folder: Path, between: str) -> None:
    record = make(("user", "q"), ("assistant", between.join(f"世{number}界" for number in range(2000))))
    for end in range(3000, 3012):
        whole, head = (SampleProcessor(processor, 100, folder) for _ in range(2))
        head._head_characters = end
        assert torch.equal(head(record, 0)["input_ids"], whole(record, 0)["input_ids"])


@pytest.mark.parametrize("generic", [False, True])
def test_an_enormous_text_is_cut_as_if_it_were_tokenized_whole(
    processor, folder: Path, generic: bool
) -> None:
    text = " ".join(f"w{number}é, 世界\n{number * 7919}" for number in range(2000))
    record = make(("user", "<image>q"), ("assistant", text), ("user", "and"), ("assistant", "b"))
    record = make(*((turn.role, turn.text) for turn in record.turns), images=("a.png",))
    for limit in (40, 41, 42, 43, 500):
        whole, head = (SampleProcessor(processor, limit, folder) for _ in range(2))
        head._head_characters = 8000
        if generic:
            head.vision = head._patches = None
        ours, theirs = head(record, 0), whole(record, 0)
        assert len(ours["input_ids"]) == limit
        for key in ("input_ids", "labels", "mm_token_type_ids", "attention_mask"):
            assert torch.equal(ours[key], theirs[key])


def test_ten_megabytes_in_one_answer_are_not_tokenized(processor, folder: Path, monkeypatch) -> None:
    samples = SampleProcessor(processor, 64, folder)
    tokenized: list[int] = []
    tokenize = samples._tokenize
    monkeypatch.setattr(samples, "_tokenize", lambda text: tokenized.append(len(text)) or tokenize(text))
    long = "one two three " * 750_000
    sample = samples(make(("user", "q"), ("assistant", long)), 0)
    short = samples(make(("user", "q"), ("assistant", long[:3000])), 0)
    assert torch.equal(sample["input_ids"], short["input_ids"]) and len(sample["input_ids"]) == 64
    assert torch.equal(sample["labels"], short["labels"])
    assert max(tokenized) <= 300_000
    late = make(
        ("user", "q"), ("assistant", long), ("user", "<image>"), ("assistant", "b"), images=("a.png",)
    )
    with pytest.raises(BadRecord, match="reach into an image"):
        samples(late, 0)
    with pytest.raises(BadRecord, match=r"over_length.*leave no label token"):
        samples(make(("user", long), ("assistant", "b")), 0)
    with pytest.raises(BadRecord, match=r"over_length.*without the end of a word"):
        samples(make(("user", "q"), ("assistant", "x" * 300_000)), 0)


def test_max_length_must_make_sense(processor, folder: Path) -> None:
    with pytest.raises(UserError, match="max_length"):
        SampleProcessor(processor, 1, folder)
