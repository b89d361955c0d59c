"""Made-up records for the benchmark of the data path, sound and faulty."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

#: Source name, share of the records, picture sizes, words of the answer.
SOURCES = (
    ("vqa_like", 0.45, ((64, 64), (96, 64)), (1, 3)),
    ("ocr_like", 0.25, ((320, 96), (200, 64), (480, 160)), (1, 6)),
    ("question_like", 0.15, ((640, 480), (480, 640)), (5, 40)),
    ("caption_like", 0.14, ((1024, 768), (768, 1024), (1600, 1200)), (80, 400)),
    ("photo_like", 0.01, ((4032, 3024),), (80, 400)),
)


def make_pictures(folder: Path) -> dict[str, list[str]]:
    """Some pictures of each source, blurred noise so that JPEGs have a natural size; relative paths."""
    random = np.random.default_rng(0)
    paths: dict[str, list[str]] = {}
    for name, _, sizes, _ in SOURCES:
        for number in range(24 if name != "photo_like" else 3):
            width, height = sizes[number % len(sizes)]
            noise = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
            picture = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
            kind = "png" if name == "vqa_like" else "jpg"
            path = folder / "images" / f"{name}-{number}.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.filter(ImageFilter.GaussianBlur(1)).save(
                path, **({} if kind == "png" else {"quality": 90})
            )
            paths.setdefault(name, []).append(f"images/{path.name}")
    return paths


def make_dataset(folder: Path, count: int) -> Path:
    """A dataset of ``count`` records over a small pool of pictures."""
    paths, random = make_pictures(folder), np.random.default_rng(1)
    words = [
        f"{a}{b}"
        for a in ("ra", "to", "mi", "sel", "con", "per")
        for b in ("ne", "sta", "lor", "ve", "dim", "")
    ]
    kinds = random.choice(len(SOURCES), size=count, p=[source[1] for source in SOURCES])
    with open(folder / "records.jsonl", "w", encoding="utf-8", newline="\n") as handle:
        for number, kind in enumerate(kinds):
            name, _, _, (low, high) = SOURCES[kind]
            question = "<image>\n" + " ".join(random.choice(words, 8)) + "?"
            answer = " ".join(random.choice(words, random.integers(low, high + 1)))
            record = {
                "id": f"{name}-{number:07d}",
                "source": name,
                "images": [paths[name][number % len(paths[name])]],
                "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
                "upstream": {},
            }
            handle.write(json.dumps(record) + "\n")
    (folder / "metadata.json").write_text(json.dumps({"num_records": count, "builder": "benchmark"}))
    return folder


def spoil(source: Path, folder: Path, share: float) -> list[int]:
    """A copy of the records of which some have one of five faults; the rows of those."""
    (folder / "images").mkdir(parents=True)
    for path in (source / "images").iterdir():
        os.link(path, folder / "images" / path.name)
    cut = (source / "images" / "caption_like-0.jpg").read_bytes()
    (folder / "images" / "cut.jpg").write_bytes(cut[: len(cut) // 3])
    records = [json.loads(line) for line in (source / "records.jsonl").open(encoding="utf-8")]
    rows = np.random.default_rng(2).choice(len(records), int(share * len(records)), replace=False)
    for kind, row in enumerate(rows.tolist()):
        record = records[row]
        question, answer = record["conversations"]
        if kind % 5 == 0:
            record["images"] = ["images/gone.jpg"]
        elif kind % 5 == 1:
            record["images"] = ["images/cut.jpg"]
        elif kind % 5 == 2:
            answer["value"] = " "
        elif kind % 5 == 3:
            question["value"] = "no marker"
        else:
            question["value"] += "<|im_end|>"
    with open(folder / "records.jsonl", "w", encoding="utf-8", newline="\n") as handle:
        handle.writelines(json.dumps(record) + "\n" for record in records)
    (folder / "metadata.json").write_text(json.dumps({"num_records": len(records), "builder": "benchmark"}))
    return sorted(rows.tolist())
