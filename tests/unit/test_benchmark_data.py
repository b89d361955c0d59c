"""The embedded benchmark: MMMU's rows, easy-VQA's test part, balanced letters, read offline by `datasets`."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import prepare_benchmark
import pytest
from odb_workflow.runtime.errors import UserError

# Columns of MMMU, in its order.
COLUMNS = [
    "id",
    "question",
    "options",
    "explanation",
    *(f"image_{number}" for number in range(1, 8)),
    "img_type",
    "answer",
    "topic_difficulty",
    "question_type",
    "subfield",
]
CHECKSUM = "40f3e42642453af069705fb88c183101f747089e465a19d6c5c8c2eb4f325785"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark") / "embedded-mmmu"
    prepare_benchmark.write_benchmark(folder, 300, 42)
    return folder


def test_datasets_reads_every_subject_offline(written: Path, tmp_path: Path) -> None:
    import datasets

    rows = []
    for subject in prepare_benchmark.SUBJECTS:
        data = datasets.load_dataset(str(written / subject), split="validation", cache_dir=str(tmp_path))
        assert data.column_names == COLUMNS
        assert isinstance(data.features["image_7"], datasets.Image)
        assert len(data) == 50
        rows += list(data)
    assert len({row["id"] for row in rows}) == 300
    first = rows[0]
    assert first["id"] == "validation_Design_1" and first["image_1"].size == (64, 64)
    assert first["image_2"] is None and first["question_type"] == "multiple-choice"
    assert first["question"].startswith("<image 1> ")


def test_gold_answers_are_easy_vqas_and_letters_are_balanced() -> None:
    import easy_vqa

    texts, answers, ids = easy_vqa.get_test_questions()
    known = {(text, image): answer for text, answer, image in zip(texts, answers, ids, strict=True)}
    letters: dict[int, Counter] = {}
    for row in prepare_benchmark.draw_rows(300, 42):
        options = ast.literal_eval(row["options"])
        image = int(row["image_1"]["path"][-8:-4])
        answer = options[ord(row["answer"]) - ord("A")]
        assert known[row["question"].removeprefix("<image 1> "), image] == answer
        assert options == sorted(set(options)) and 2 <= len(options) <= 4
        letters.setdefault(len(options), Counter())[row["answer"]] += 1
    for count, used in letters.items():
        assert len(used) == count and max(used.values()) - min(used.values()) <= 1


def test_the_same_everywhere_and_another_seed_is_another_benchmark(written: Path, tmp_path: Path) -> None:
    summary = json.loads((written / "benchmark.json").read_text())
    assert summary["checksum"] == CHECKSUM
    assert summary["chance_accuracy"] == pytest.approx(0.325)
    assert prepare_benchmark.write_benchmark(tmp_path / "b", 60, 42)["checksum"] != CHECKSUM
    assert prepare_benchmark.write_benchmark(tmp_path / "b", 300, 1)["checksum"] != CHECKSUM


def test_too_few_and_too_many_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="5 rows for 6 subjects"):
        prepare_benchmark.write_benchmark(tmp_path / "x", 5, 42)
    with pytest.raises(UserError, match="too few"):
        prepare_benchmark.write_benchmark(tmp_path / "x", 10_000, 42)
    assert not (tmp_path / "x").exists()


def test_no_picture_of_the_benchmark_is_in_the_training_part() -> None:
    import easy_vqa

    def contents(paths: dict[int, str]) -> set[bytes]:
        return {Path(path).read_bytes() for path in paths.values()}

    shared = contents(easy_vqa.get_train_image_paths()) & contents(easy_vqa.get_test_image_paths())
    assert not shared
