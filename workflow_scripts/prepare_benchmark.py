#!/usr/bin/env python3
"""Write the embedded multiple-choice benchmark: easy-VQA's test part in MMMU's row layout.

Subject names are MMMU's (one of each of its six categories) so that every program that reads MMMU reads
this too; the questions are easy-VQA's, about one colored shape, and have nothing to do with the subjects.
Scores on it say whether the embedded model learned to read pictures, nothing else.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import logging
import random
from pathlib import Path
from typing import Any

from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.files import atomic_directory, atomic_write_json
from odb_workflow.runtime.log import setup_logging

CODE_VERSION = 1

logger = logging.getLogger(__name__)

# One subject of each of MMMU's six categories.
SUBJECTS = ("Design", "Marketing", "Math", "Pharmacy", "Psychology", "Computer_Science")
LETTERS = "ABCDEFGH"
COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SHAPES = ("circle", "rectangle", "triangle")
# kind -> (groups of answers, share of the rows); a question's options are one answer of each group.
KINDS = {
    "color": (tuple(COLORS[start : start + 2] for start in range(0, 8, 2)), 0.5),
    "shape": (tuple((shape,) for shape in SHAPES), 0.3),
    "presence": ((("no",), ("yes",)), 0.2),
}
DEFAULT_ROWS = 300
SUMMARY = "benchmark.json"


def shuffled(items: list[Any], draw: random.Random) -> list[Any]:
    """Shuffled copy that depends on ``draw.random()`` only, whose stream Python guarantees."""
    return [item for _, item in sorted(((draw.random(), index), item) for index, item in enumerate(items))]


def draw_rows(total: int, seed: int) -> list[dict[str, Any]]:
    """Draw ``total`` questions of the test part as multiple choice, interleaved over the subjects.

    Options stand in alphabetical order, as in the embedded TMDB's multiple-choice records. Within each kind
    of question the gold letters are balanced to within one, so that a fixed letter scores chance. Images are
    given as ``{"bytes", "path"}``.

    Raises:
        UserError: fewer rows than subjects, or more than the package has.
    """
    import easy_vqa

    if total < len(SUBJECTS):
        raise UserError(f"{total} rows for {len(SUBJECTS)} subjects", fix=f"ask for at least {len(SUBJECTS)}")
    draw = random.Random(f"embedded-mmmu/{seed}")
    texts, answers, image_ids = easy_vqa.get_test_questions()
    files = easy_vqa.get_test_image_paths()
    counts = {name: int(total * share) for name, (_, share) in KINDS.items()}
    counts["color"] += total - sum(counts.values())
    drawn = []
    for name, (groups, _) in KINDS.items():
        pools = [
            shuffled([index for index, answer in enumerate(answers) if answer in group], draw)
            for group in groups
        ]
        for place in range(counts[name]):
            gold = place % len(groups)
            if not pools[gold]:
                raise UserError(
                    f"{counts[name]} {name} questions asked for, easy-VQA's test part has too few",
                    fix=f"ask for fewer than {total} rows",
                )
            index = pools[gold].pop()
            options = [group[int(draw.random() * len(group))] for group in groups]
            options[gold] = answers[index]
            image = Path(files[image_ids[index]])
            drawn.append(
                {
                    "question": f"<image 1> {texts[index]}",
                    "options": str(options),
                    "answer": LETTERS[gold],
                    "image_1": {
                        "bytes": image.read_bytes(),
                        "path": f"easy_vqa_test_{image_ids[index]:04d}.png",
                    },
                    "subfield": f"easy-VQA {name}",
                }
            )
    rows = []
    for place, row in enumerate(shuffled(drawn, draw)):
        subject = SUBJECTS[place % len(SUBJECTS)]
        rows.append(
            mmmu_row(f"validation_{subject}_{place // len(SUBJECTS) + 1}", row) | {"subject": subject}
        )
    return rows


def mmmu_row(identity: str, row: dict[str, Any]) -> dict[str, Any]:
    """All columns of an MMMU row, in MMMU's order."""
    return {
        "id": identity,
        "question": row["question"],
        "options": row["options"],
        "explanation": "",
        **{f"image_{number}": row.get(f"image_{number}") for number in range(1, 8)},
        "img_type": "['Geometric Shapes']",
        "answer": row["answer"],
        "topic_difficulty": "Easy",
        "question_type": "multiple-choice",
        "subfield": row["subfield"],
    }


def mmmu_features() -> Any:
    """The ``datasets.Features`` of MMMU."""
    from datasets import Features, Image, Value

    empty = dict.fromkeys(("question", "options", "answer", "subfield"), "")
    return Features(
        {name: Image() if name.startswith("image_") else Value("string") for name in mmmu_row("", empty)}
    )


def write_benchmark(output: Path, total: int, seed: int) -> dict[str, Any]:
    """Write each subject's parquet file and ``benchmark.json``; the folder appears whole or not at all."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rows = draw_rows(total, seed)
    features = mmmu_features()
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row["image_1"]["bytes"])
        digest.update(json.dumps({key: value for key, value in row.items() if key != "image_1"}).encode())
    summary = {
        "name": "embedded-mmmu",
        "layout": "MMMU",
        "content": "easy-VQA 1.0, test part, as multiple choice; the subject names carry no meaning",
        "split": "validation",
        "num_rows": len(rows),
        "subjects": {name: sum(row["subject"] == name for row in rows) for name in SUBJECTS},
        "chance_accuracy": sum(1 / len(ast.literal_eval(row["options"])) for row in rows) / len(rows),
        "seed": seed,
        "checksum": digest.hexdigest(),
    }
    with atomic_directory(output) as folder:
        for subject in SUBJECTS:
            chosen = [
                {key: value for key, value in row.items() if key != "subject"}
                for row in rows
                if row["subject"] == subject
            ]
            (folder / subject).mkdir()
            Dataset.from_list(chosen, features=features).to_parquet(
                folder / subject / "validation-00000-of-00001.parquet"
            )
        atomic_write_json(folder / SUMMARY, summary)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("data/embedded-mmmu"), help="default: %(default)s"
    )
    parser.add_argument(
        "--rows", type=int, default=DEFAULT_ROWS, help="questions in all; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    options = parser.parse_args()
    setup_logging()
    summary = write_benchmark(options.output, options.rows, options.seed)
    logger.info(
        "%d rows, %d subjects, chance %.3f -> %s",
        summary["num_rows"],
        len(summary["subjects"]),
        summary["chance_accuracy"],
        options.output,
    )


if __name__ == "__main__":
    run_main(main)
