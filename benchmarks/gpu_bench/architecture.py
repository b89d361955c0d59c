"""Qwen3-VL-2B's published architecture with random weights, a tiny stand-in, and a processor for both."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from odb_workflow.model.embedded import SPECIAL_TOKENS, TURN_END, build_processor, train_tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

# Ids of Qwen3-VL's special tokens, in the order of SPECIAL_TOKENS.
FIRST_SPECIAL_ID = 151_643
TOKEN_IDS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
PAD_ID = 151_643
END_ID = 151_645

TEXT_2B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
    "bos_token_id": PAD_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": True,
}
VISION_2B: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
TEXT_TINY = TEXT_2B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": TEXT_2B["rope_parameters"] | {"mrope_section": [4, 2, 2]},
}
VISION_TINY = VISION_2B | {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


def architecture(tiny: bool) -> Qwen3VLConfig:
    """The configuration of Qwen3-VL-2B-Instruct (its config.json), or one that a CPU runs in seconds."""
    return Qwen3VLConfig(
        text_config=dict(TEXT_TINY if tiny else TEXT_2B),
        vision_config=dict(VISION_TINY if tiny else VISION_2B),
        tie_word_embeddings=True,
        **TOKEN_IDS,
    )


def random_model(
    config: Qwen3VLConfig, device: torch.device, dtype: torch.dtype, seed: int
) -> torch.nn.Module:
    """The model, its weights drawn on ``device``; rotary frequencies stay float32, as after loading."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Qwen3VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    return model


def restore_rotary(model: torch.nn.Module) -> None:
    """Rotary frequencies in float32 again, after the model's type was changed."""
    fresh = fresh_rotary(model)
    for name, buffer in fresh.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)


def fresh_rotary(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The frequencies that a new model of this configuration starts with, by buffer name."""
    language, visual = model.model.language_model, model.model.visual
    device = next(model.parameters()).device
    made = {
        "model.language_model.rotary_emb": type(language.rotary_emb)(language.config),
        "model.visual.rotary_pos_emb": type(visual.rotary_pos_emb)(visual.config),
    }
    return {
        f"{path}.{name}": buffer.to(device)
        for path, module in made.items()
        for name, buffer in module.named_buffers()
    }


def save_processor(folder: Path, words: list[str]) -> None:
    """A processor whose special tokens have Qwen3-VL's ids; its words are learned from ``words``.

    The learned vocabulary is small; what is missing up to the first special id is filled with entries that no
    text can produce.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    small = train_tokenizer(words, vocab_size=2048)
    learned = json.loads(small.backend_tokenizer.to_str())["model"]
    vocabulary = dict(learned["vocab"])
    for number in range(len(vocabulary), FIRST_SPECIAL_ID):
        vocabulary[f"\u0000unused-{number}"] = number
    expected = {token: FIRST_SPECIAL_ID + number for number, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= expected
    merges = [
        tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ", 1)) for pair in learned["merges"]
    ]
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        unk_token=None,
        eos_token=TURN_END,
        pad_token=SPECIAL_TOKENS[0],
        model_max_length=TEXT_2B["max_position_embeddings"],
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    found = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    if found != expected:
        raise ValueError(f"special tokens lie at {found}, not at {expected}")
    processor = build_processor(tokenizer)
    processor.image_processor.size = {"shortest_edge": 1024, "longest_edge": 589_824}
    processor.save_pretrained(folder)


def made_up_words(count: int, seed: int) -> list[str]:
    """Words of two to four syllables, each (almost) a token of its own after training on them."""
    chance = random.Random(seed)
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    return ["".join(chance.choices(syllables, k=chance.randint(2, 4))) for _ in range(count)]
