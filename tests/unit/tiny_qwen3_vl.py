"""A random Qwen3-VL of a few thousand parameters, and random samples for it, without tokenizer or files."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

IMAGE, VIDEO, VISION_START, VISION_END, PAD = 300, 301, 302, 303, 0
PATCH_WIDTH = 3 * 2 * 4 * 4


def tiny_config(tied: bool = True) -> Qwen3VLConfig:
    """Four text layers with grouped heads, four vision layers, deepstack after the first and third."""
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "pad_token_id": PAD,
            "initializer_range": 0.08,
            "tie_word_embeddings": tied,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
            "initializer_range": 0.1,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
    )


def tiny_model(tied: bool = True, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """The model with random weights (biases too, so that a forgotten one shows)."""
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(tiny_config(tied))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def make_sample(
    row: int, text: int, grids: Sequence[tuple[int, int, int]] = (), labels: int | None = None
) -> dict[str, Any]:
    """A sample: the images, then ``text`` tokens, the last ``labels`` (default half) with a loss."""
    generator = torch.Generator().manual_seed(1000 + row)
    tokens, types = [5, 6], [0, 0]
    pixels = []
    for frames, height, width in grids:
        count = frames * height * width // 4
        tokens += [VISION_START, *[IMAGE] * count, VISION_END]
        types += [0, *[1] * count, 0]
        pixels.append(torch.randn(frames * height * width, PATCH_WIDTH, generator=generator))
    tokens += torch.randint(10, 290, (text,), generator=generator).tolist()
    types += [0] * text
    trained = text // 2 if labels is None else labels
    sample = {
        "row": row,
        "input_ids": torch.tensor(tokens),
        "attention_mask": torch.ones(len(tokens), dtype=torch.int64),
        "labels": torch.tensor([-100] * (len(tokens) - trained) + tokens[len(tokens) - trained :]),
        "mm_token_type_ids": torch.tensor(types),
    }
    if grids:
        sample["pixel_values"] = torch.cat(pixels)
        sample["image_grid_thw"] = torch.tensor(list(grids))
        sample["odb_n_patches"] = int(sample["pixel_values"].shape[0])
    return sample


SAMPLES: dict[str, list[dict[str, Any]]] = {
    "text": [make_sample(0, 24), make_sample(1, 9), make_sample(2, 31)],
    "image": [
        make_sample(3, 8, [(1, 4, 4)]),
        make_sample(4, 20, [(1, 8, 6)]),
        make_sample(5, 8, [(1, 4, 4)]),
    ],
    "mixed": [make_sample(6, 21), make_sample(7, 10, [(1, 6, 4)]), make_sample(8, 5, labels=1)],
    "several": [
        make_sample(9, 12, [(1, 4, 4), (1, 2, 8), (1, 10, 4)]),
        make_sample(10, 30),
        make_sample(11, 7, [(1, 2, 2), (1, 2, 2)], labels=7),
    ],
    "one": [make_sample(12, 17, [(1, 6, 6)])],
}


def plain(model: torch.nn.Module, samples: Sequence[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Summed loss and gradients of the transformers forward itself, sample by sample, on an untouched copy.

    Parameters without a gradient are left out.
    """
    model = copy.deepcopy(model).train()
    total = 0.0
    for sample in samples:
        inputs = {
            name: sample[name][None]
            for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
        }
        for name in ("pixel_values", "image_grid_thw"):
            if name in sample:
                inputs[name] = sample[name]
        count = int((sample["labels"][1:] != -100).sum())
        if count == 0:
            continue
        loss = model(**inputs, use_cache=False).loss * count
        if loss.requires_grad:  # not so for a text sample when only vision parts are trained
            loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain_logits(model: torch.nn.Module, sample: dict[str, Any]) -> torch.Tensor:
    """Logits [L, V] of the transformers forward for one sample."""
    inputs = {name: sample[name][None] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    for name in ("pixel_values", "image_grid_thw"):
        if name in sample:
            inputs[name] = sample[name]
    with torch.no_grad():
        return copy.deepcopy(model).eval()(**inputs, use_cache=False).logits[0]


def gradient_norm(gradients: dict[str, torch.Tensor]) -> float:
    """Norm over all gradients, in float64."""
    return float(torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients.values())))
