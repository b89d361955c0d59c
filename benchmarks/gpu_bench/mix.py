"""Synthetic data in the manner of the public MM-Mix: seven sources with lengths and image sizes of their own.

Shapes only; contents are random. The means come close to those measured on the real mixture: 788 tokens a
sample, 287 of them image tokens, 453 label tokens.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

MERGED_PATCH = 32  # pixels per side of one image token
MAX_IMAGE_TOKENS = 576  # image_max_pixels 589,824


@dataclass(frozen=True)
class Source:
    """Shapes of one source: mean tokens of image, prompt and answer; spreads on the log scale."""

    name: str
    share: float
    image: float
    image_spread: float
    prompt: int
    answer: float
    answer_spread: float


SOURCES = (
    Source("aokvqa", 0.08, 280, 0.2, 40, 40, 0.4),
    Source("chinese_text_recognition", 0.10, 50, 0.5, 16, 12, 0.5),
    Source("iiit5k", 0.05, 24, 0.5, 14, 6, 0.3),
    Source("image_textualization", 0.22, 390, 0.25, 24, 560, 0.45),
    Source("orand_car_a", 0.05, 30, 0.4, 16, 8, 0.2),
    Source("sharegpt4o", 0.25, 400, 0.3, 60, 1080, 0.65),
    Source("vqa_like", 0.25, 280, 0.3, 60, 180, 0.8),
)


@dataclass(frozen=True)
class Shape:
    """Token counts of one sample; ``grid`` is the image's height and width in merged patches."""

    source: str
    grid: tuple[int, int]
    prompt: int
    answer: int

    @property
    def length(self) -> int:
        """Tokens: frame of the conversation, image with its two marks, prompt, answer with its end."""
        return 8 + self.grid[0] * self.grid[1] + 2 + self.prompt + self.answer


def draw_shapes(count: int, seed: int, shrink: int = 1) -> list[Shape]:
    """``count`` samples in random order; ``shrink`` divides all sizes, for trying things on a CPU."""
    chance = random.Random(seed)
    shapes = []
    for source in chance.choices(SOURCES, weights=[source.share for source in SOURCES], k=count):
        tokens = _lognormal(chance, source.image / shrink, source.image_spread)
        tokens = min(tokens, MAX_IMAGE_TOKENS / shrink)
        aspect = chance.uniform(0.6, 1.7)
        height = max(1, round((tokens * aspect) ** 0.5))
        width = max(1, min(round(tokens / height), MAX_IMAGE_TOKENS // height))
        answer = max(2, round(_lognormal(chance, source.answer / shrink, source.answer_spread)))
        prompt = max(2, round(chance.uniform(0.6, 1.4) * source.prompt / shrink))
        shapes.append(Shape(source.name, (height, width), prompt, min(answer, 8192)))
    return shapes


def describe(shapes: Sequence[Shape]) -> dict[str, float]:
    """Means per sample, for the record."""
    return {
        "samples": len(shapes),
        "mean_tokens": float(np.mean([shape.length for shape in shapes])),
        "mean_image_tokens": float(np.mean([shape.grid[0] * shape.grid[1] for shape in shapes])),
        "mean_label_tokens": float(np.mean([shape.answer for shape in shapes])),
        "longest": max(shape.length for shape in shapes),
    }


class PixelPool:
    """Random pixels to cut samples from: drawing them anew for each would take longer than the training.

    Args:
        patches: Patches in the pool; ``width`` values each.
    """

    def __init__(self, patches: int, width: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = torch.randn(patches, width, generator=generator).to(dtype)

    def __call__(self, row: int, patches: int) -> torch.Tensor:
        """Pixels [patches, width], the same for the same row."""
        start = random.Random(row).randrange(len(self.values) - patches)
        return self.values[start : start + patches]


def make_sample(row: int, shape: Shape, pixels: PixelPool, ids: dict[str, int]) -> dict[str, Any]:
    """Tensors of one sample, as the project's sample processor makes them."""
    chance = np.random.default_rng(row)
    height, width = shape.grid
    image = height * width
    text = chance.integers(300, 100_000, size=8 + shape.prompt + shape.answer)
    tokens = np.concatenate(
        [
            text[:4],
            [ids["vision_start_token_id"]],
            np.full(image, ids["image_token_id"]),
            [ids["vision_end_token_id"]],
            text[4:],
        ]
    ).astype(np.int64)
    types = (tokens == ids["image_token_id"]).astype(np.int64)
    labels = np.full(len(tokens), -100, dtype=np.int64)
    labels[-shape.answer :] = tokens[-shape.answer :]
    return {
        "row": row,
        "input_ids": torch.from_numpy(tokens),
        "attention_mask": torch.ones(len(tokens), dtype=torch.int64),
        "labels": torch.from_numpy(labels),
        "mm_token_type_ids": torch.from_numpy(types),
        "pixel_values": pixels(row, 4 * image),
        "image_grid_thw": torch.tensor([[1, 2 * height, 2 * width]]),
    }


def odb_groups(lengths: Sequence[int], budget: int, buffer: int, seed: int) -> list[list[int]]:
    """Groups as ODB forms them from a full buffer: neighbors in length, ``budget // longest`` each."""
    groups = []
    for start in range(0, len(lengths) - buffer + 1, buffer):
        window = sorted(range(start, start + buffer), key=lambda n: lengths[n])
        while window:
            # The longest of a group decides how many there are.
            count = max(budget // lengths[window[-1]], 1)
            groups.append(window[-count:])
            window = window[:-count]
    random.Random(seed).shuffle(groups)
    return groups


def write_tmdb(folder: Path, shapes: Sequence[Shape], words: Sequence[str], seed: int, workers: int) -> None:
    """A TMDB with real JPEG files (smooth random pictures) and made-up sentences, about one word a token."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    jobs = [(str(folder), number, shape.grid, seed) for number, shape in enumerate(shapes)]
    # forked also below a spawned process, whose children would each import torch anew
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        names = list(pool.map(_write_picture, jobs, chunksize=32))
    chance = random.Random(seed)
    counts: dict[str, int] = {}
    with open(folder / "records.jsonl", "w", encoding="utf-8") as records:
        for number, (shape, name) in enumerate(zip(shapes, names, strict=True)):
            counts[shape.source] = counts.get(shape.source, 0) + 1
            record = {
                "id": f"{shape.source}-{number:06d}",
                "source": shape.source,
                "images": [name],
                "conversations": [
                    {"from": "human", "value": "<image>\n" + " ".join(chance.choices(words, k=shape.prompt))},
                    {"from": "gpt", "value": " ".join(chance.choices(words, k=max(1, shape.answer - 1)))},
                ],
            }
            records.write(json.dumps(record) + "\n")
    metadata = {"num_records": len(shapes), "sources": counts, "builder": "benchmarks/gpu_record.py"}
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")


def picture(grid: tuple[int, int], seed: Sequence[int]) -> Any:
    """A smooth random RGB picture of ``grid`` (height, width in merged patches)."""
    from PIL import Image

    height, width = grid
    coarse = np.random.default_rng(seed).integers(0, 256, size=(height + 2, width + 2, 3), dtype=np.uint8)
    size = (width * MERGED_PATCH, height * MERGED_PATCH)
    return Image.fromarray(coarse).resize(size, Image.BICUBIC)


def _write_picture(job: tuple[str, int, tuple[int, int], int]) -> str:
    folder, number, grid, seed = job
    name = f"images/{number:06d}.jpg"
    picture(grid, [seed, number]).save(Path(folder) / name, quality=90)
    return name


def _lognormal(chance: random.Random, mean: float, spread: float) -> float:
    return mean * chance.lognormvariate(-spread * spread / 2, spread)
