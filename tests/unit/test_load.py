"""Loading models and processors, and what is said when it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from odb_workflow.loaders.collate import Collator
from odb_workflow.model.forward import build_forward
from odb_workflow.model.load import check_model_path, load_model, load_processor, set_image_max_pixels
from odb_workflow.runtime.errors import UserError
from tiny_qwen3_vl import PAD, SAMPLES, tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without processor files."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = tiny_model()
    build_forward(model, "auto", "cpu", training=True)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_gives_the_same_loss(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tied)
    forward = build_forward(model, "auto", "cpu", training=True)
    batch = Collator.from_config(model.config, PAD)(SAMPLES["several"])
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert (loaded.lm_head.weight is loaded.model.language_model.embed_tokens.weight) is tied
    # nothing of the fast forward is left in what was saved
    assert loaded.config.text_config._attn_implementation == "sdpa"
    assert loaded.config.vision_config._attn_implementation == "sdpa"
    again = build_forward(loaded, "reference", "cpu", training=False)
    assert again(batch).item() == pytest.approx(forward(batch).item(), rel=1e-6)


def test_dtype_and_attention_of_choice(saved: Path) -> None:
    model = load_model(saved, dtype=torch.bfloat16, attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert model.config.text_config._attn_implementation == "eager"
    assert not model.training


def test_missing_and_wrong_directories(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model directory"):
        load_model(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_model(tmp_path)
    assert check_model_path("Qwen/Qwen3-VL-2B-Instruct") == "Qwen/Qwen3-VL-2B-Instruct"
    with pytest.raises(UserError, match="no model directory qwen3"):
        check_model_path("qwen3")


def test_hub_id_without_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="cannot load the configuration of nobody/nothing") as caught:
        load_model("nobody/nothing", offline=True)
    assert "HF_HUB_OFFLINE" in caught.value.fix


def test_checkpoint_without_weights_or_with_foreign_ones(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    with pytest.raises(UserError, match="cannot load the weights"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="cannot load the weights"):
        load_model(tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(saved / "model.safetensors")
    weights.pop("model.language_model.layers.2.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights.*layers\.2\.mlp\.up_proj"):
        load_model(tmp_path)


def test_text_model_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="qwen2 model without image support"):
        load_model(tmp_path)


def test_processor_of_the_base_model_stands_in(saved: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(UserError, match="cannot load the processor"):
        load_processor(saved)
    processor = load_processor(saved, fallback=tiny_model_dir, image_max_pixels=65536)
    assert processor.image_processor.size["longest_edge"] == 65536


class FakeProcessor:
    class image_processor:
        patch_size, merge_size = 16, 2
        size = {"shortest_edge": 65536, "longest_edge": 16777216}  # noqa: RUF012


def test_image_bound_keeps_the_lower_one_below_it() -> None:
    set_image_max_pixels(FakeProcessor, 589824)
    assert FakeProcessor.image_processor.size == {"shortest_edge": 65536, "longest_edge": 589824}
    set_image_max_pixels(FakeProcessor, 16384)
    assert FakeProcessor.image_processor.size == {"shortest_edge": 16384, "longest_edge": 16384}
    with pytest.raises(UserError, match=r"less than one image token \(1024 pixels\)"):
        set_image_max_pixels(FakeProcessor, 1000)
