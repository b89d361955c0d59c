"""Multiple-choice rows in MMMU's layout with made-up pictures and questions of MMMU's usual size."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path

from prepare_benchmark import LETTERS, SUBJECTS, mmmu_features, mmmu_row

from .mix import picture


def write_multiple_choice(folder: Path, items: int, words: Sequence[str], seed: int, shrink: int = 1) -> None:
    """Write ``items`` rows, one parquet file a subject: pictures of about 300 tokens, questions of about 100.

    Args:
        shrink: divides all sizes, for trying things on a CPU.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    chance = random.Random(seed)
    rows: dict[str, list[dict]] = {}
    for number in range(items):
        subject = SUBJECTS[number % len(SUBJECTS)]
        grid = tuple(max(1, round(chance.uniform(12, 23) / shrink**0.5)) for _ in range(2))
        encoded = io.BytesIO()
        picture(grid, [seed, number, 1]).save(encoded, "JPEG", quality=90)
        options = [" ".join(chance.choices(words, k=3)) for _ in range(chance.randint(2, 5))]
        question = " ".join(chance.choices(words, k=chance.randint(40, 130) // shrink + 2))
        row = {
            "question": f"<image 1> {question}",
            "options": str(options),
            "answer": LETTERS[chance.randrange(len(options))],
            "image_1": {"bytes": encoded.getvalue(), "path": f"{number:04d}.jpg"},
            "subfield": "made up",
        }
        rows.setdefault(subject, []).append(mmmu_row(f"validation_{subject}_{number}", row))
    features = mmmu_features()
    for subject, chosen in rows.items():
        (folder / subject).mkdir(parents=True)
        Dataset.from_list(chosen, features=features).to_parquet(
            folder / subject / "validation-00000-of-00001.parquet"
        )
