"""Data and models for evaluation.py: the embedded ones, or synthetic ones of MM-Mix-like lengths."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from odb_workflow.model.embedded import (
    build_embedded_model,
    build_processor,
    embedded_config,
    train_tokenizer,
)
from odb_workflow.tmdb.store import RecordStore


def make_embedded(work: Path, samples: int) -> tuple[Path, Path, Path]:
    """The workflow's embedded model, TMDB and benchmark; returns their places."""
    import prepare_benchmark
    from odb_mm_mix.mix import items, scaled_sizes
    from odb_mm_mix.writer import write_tmdb

    write_tmdb(items(scaled_sizes(samples), seed=42), work / "tmdb", seed=42, overwrite=True)
    store = RecordStore(work / "tmdb")
    texts = (turn.text for row in range(len(store)) for turn in store[row].turns)
    build_embedded_model([*texts, "ABCDEFGH (A) (B) Answer with the option letter only."], work / "model")
    prepare_benchmark.write_benchmark(work / "mmmu", samples, 42)
    return work / "model", work / "tmdb", work / "mmmu"


def make_synthetic(work: Path, samples: int) -> tuple[Path, Path, Path]:
    """MM-Mix-like records and questions with pictures of about 300 tokens; a processor without a model."""
    import numpy as np
    from PIL import Image

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 8))) for _ in range(3000)]
    data = work / "tmdb"
    (data / "images").mkdir(parents=True)
    records, rows = [], []
    pixels = np.random.default_rng(0)
    for number in range(samples):
        width, height = draw.randint(400, 760), draw.randint(400, 760)
        coarse = pixels.integers(0, 255, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
        name = f"images/{number}.jpg"
        Image.fromarray(coarse).resize((width, height)).save(data / name)
        answer = " ".join(draw.choices(words, k=max(1, int(draw.lognormvariate(5.4, 0.8)))))
        question = " ".join(draw.choices(words, k=draw.randint(5, 40)))
        turns = [{"from": "human", "value": f"<image>{question}?"}, {"from": "gpt", "value": answer}]
        records.append({"id": str(number), "source": "synthetic", "images": [name], "conversations": turns})
        options = [" ".join(draw.choices(words, k=3)) for _ in range(4)]
        rows.append(
            {
                "id": f"validation_Art_{number}",
                "question": f"{question}? <image 1>",
                "options": str(options),
                "answer": draw.choice("ABCD"),
                "image_1": name,
            }
        )
    for name, lines in (("records.jsonl", records), ("rows.jsonl", rows)):
        (data / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (data / "metadata.json").write_text(json.dumps({"num_records": samples, "builder": "benchmark"}))
    # Twice, because pairs seen once are not merged: a word shall be one or two tokens, as in real text.
    texts = [" ".join(words)] * 2 + ["(A) ABCDEFGH Answer with the option letter only."] * 2
    tokenizer = train_tokenizer(texts, 8000)
    build_processor(tokenizer).save_pretrained(work / "model")
    return work / "model", data, data / "rows.jsonl"


def make_2b(tokenizer: Any, device: str) -> torch.nn.Module:
    """Qwen3-VL-2B-Instruct's architecture with random bf16 weights."""
    from transformers import Qwen3VLForConditionalGeneration

    config = embedded_config(
        tokenizer,
        text_layers=28,
        text_hidden_size=2048,
        text_heads=16,
        text_kv_heads=8,
        vision_layers=24,
        vision_hidden_size=1024,
        vision_heads=16,
        patch_size=16,
        merge_size=2,
        text_initializer_range=0.02,
        vision_initializer_range=0.02,
    )
    config.text_config.vocab_size = 151936
    config.vision_config.num_position_embeddings = 2304
    config.vision_config.deepstack_visual_indexes = [5, 11, 17]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3VLForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
