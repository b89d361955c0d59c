"""The embedded model is an ordinary Qwen3-VL directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from odb_workflow.model.embedded import SPECIAL_TOKENS, build_embedded_model
from odb_workflow.runtime.errors import UserError
from PIL import Image

TEXTS = ["what color is the circle? (A) red (B) blue", "is there a rectangle? yes no"] * 3
SMALL = {
    "text_hidden_size": 32,
    "text_heads": 2,
    "text_kv_heads": 1,
    "vision_hidden_size": 32,
    "vision_heads": 2,
}


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir)
    return AutoProcessor.from_pretrained(tiny_model_dir), model


def test_turns_are_those_of_qwen(loaded) -> None:
    processor, _ = loaded
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what shape?"}]},
    ]
    assert processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what shape?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_option_letters_are_single_tokens_after_the_prompt(loaded) -> None:
    tokenizer = loaded[0].tokenizer
    prompt = "<|im_start|>assistant\n"
    before = tokenizer.encode(prompt)
    letters = [tokenizer.encode(prompt + letter) for letter in "ABCDEFGH"]
    assert all(ids[:-1] == before for ids in letters)
    assert len({ids[-1] for ids in letters}) == 8


def test_special_tokens_are_single_and_text_survives(loaded) -> None:
    tokenizer = loaded[0].tokenizer
    assert all(len(tokenizer.encode(token)) == 1 for token in SPECIAL_TOKENS)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = "caf\u00e9 \u4e2d\u6587 \U0001f600\n\ttab 3.14"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_small_picture_stays_four_tokens_and_the_model_sees_it(loaded) -> None:
    processor, model = loaded
    prompt = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"
    outputs = []
    for color in ("red", "blue"):
        inputs = processor(text=[prompt], images=[Image.new("RGB", (64, 64), color)], return_tensors="pt")
        assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
        assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 4
        with torch.no_grad():
            outputs.append(model(**inputs).logits[0, -1])
    assert not torch.allclose(outputs[0], outputs[1])


def test_initial_weights_have_the_asked_spread(loaded) -> None:
    model = loaded[1].model
    assert model.language_model.embed_tokens.weight.std().item() == pytest.approx(0.08, rel=0.05)
    assert model.visual.merger.linear_fc1.weight.std().item() == pytest.approx(0.1, rel=0.05)


def test_same_seed_same_files_and_the_callers_random_state_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    build_embedded_model(TEXTS, tmp_path / "a", vocab_size=300, seed=1, **SMALL)
    assert torch.equal(torch.rand(1), expected)
    build_embedded_model(TEXTS, tmp_path / "b", vocab_size=300, seed=1, **SMALL)
    build_embedded_model(TEXTS, tmp_path / "c", vocab_size=300, seed=2, **SMALL)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {name: (tmp_path / "a" / name).read_bytes() for name in names} == {
        name: (tmp_path / "b" / name).read_bytes() for name in names
    }
    weights = "model.safetensors"
    assert (tmp_path / "a" / weights).read_bytes() != (tmp_path / "c" / weights).read_bytes()


def test_no_text_and_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text"):
        build_embedded_model([], tmp_path / "x")
    with pytest.raises(UserError, match="head size"):
        build_embedded_model(TEXTS, tmp_path / "x", text_hidden_size=36, text_heads=4)
    assert not (tmp_path / "x").exists()
