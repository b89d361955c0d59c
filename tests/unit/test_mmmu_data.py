"""Benchmark rows from folders, saved datasets and files; subjects and categories."""

from __future__ import annotations

import io
from pathlib import Path

import datasets
import pytest
from odb_workflow.evaluation.mmmu_data import load_benchmark
from odb_workflow.evaluation.mmmu_subjects import CATEGORIES, SUBJECTS, category_of, parse_subjects
from odb_workflow.runtime.errors import UserError
from PIL import Image

FEATURES = datasets.Features(
    {name: datasets.Value("string") for name in ("id", "question", "options", "answer")}
    | {f"image_{number}": datasets.Image() for number in (1, 2)}
)


def png(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(buffer, "PNG")
    return buffer.getvalue()


def subject_rows(subject: str, n: int) -> list[dict]:
    return [
        {
            "id": f"validation_{subject}_{index}",
            "question": f"Question {index} <image 1>",
            "options": "['a', 'b']",
            "answer": "A",
            "image_1": {"bytes": png("red"), "path": None} if index else None,
            "image_2": {"bytes": png("blue"), "path": None},
        }
        for index in range(n)
    ]


def table(subject: str, n: int = 3) -> datasets.Dataset:
    return datasets.Dataset.from_list(subject_rows(subject, n), features=FEATURES)


@pytest.fixture
def per_subject(tmp_path: Path) -> Path:
    """The layout of the Hub: one folder of parquet files per subject."""
    for subject in ("Math", "Art"):
        (tmp_path / "bench" / subject).mkdir(parents=True)
        table(subject).to_parquet(tmp_path / "bench" / subject / "validation-00000-of-00001.parquet")
        table(subject, 1).to_parquet(tmp_path / "bench" / subject / "dev-00000-of-00001.parquet")
    return tmp_path / "bench"


def test_thirty_subjects_in_six_categories():
    assert len(SUBJECTS) == 30 and len(CATEGORIES) == 6
    assert list(SUBJECTS) == sorted(SUBJECTS)
    assert category_of("Diagnostics_and_Laboratory_Medicine") == "Health & Medicine"
    assert category_of("Selfmade") == "Other"
    assert parse_subjects(" Art , Math,Art ") == ["Art", "Math"]
    assert parse_subjects("all") is None and parse_subjects("") is None


def test_a_folder_per_subject(per_subject: Path):
    benchmark = load_benchmark(str(per_subject), "validation", None)
    assert benchmark.subjects == ["Art", "Math"]
    assert len(benchmark.absent) == 28
    assert [row.sample_id for row in benchmark.rows] == [
        f"validation_{subject}_{index}" for subject in ("Art", "Math") for index in range(3)
    ]
    assert benchmark.rows[0].present == (2,)
    assert benchmark.rows[1].present == (1, 2)
    assert benchmark.rows[1].image(1) == png("red")
    assert benchmark.rows[1].image(2) == png("blue")


def test_chosen_subjects_in_the_order_given(per_subject: Path):
    benchmark = load_benchmark(str(per_subject), "validation", ["Math"])
    assert {row.subject for row in benchmark.rows} == {"Math"} and benchmark.absent == []
    assert load_benchmark(str(per_subject), "validation", ["Math", "Art"]).subjects == ["Math", "Art"]
    assert len(load_benchmark(str(per_subject), "dev", None).rows) == 2


def test_a_missing_subject_names_the_nearest(per_subject: Path):
    with pytest.raises(UserError, match=r"no such subject: .art. .nearest: Art"):
        load_benchmark(str(per_subject), "validation", ["art", "Math"])


def test_a_missing_split_names_those_there(per_subject: Path):
    with pytest.raises(
        UserError, match="no rows of split 'test' in this folder; splits there: dev, validation"
    ):
        load_benchmark(str(per_subject), "test", None)


def test_saved_datasets_in_each_form(tmp_path: Path):
    datasets.DatasetDict({"validation": table("Art"), "dev": table("Art", 1)}).save_to_disk(tmp_path / "a")
    datasets.DatasetDict({"Art": table("Art"), "Math": table("Math")}).save_to_disk(tmp_path / "b")
    table("Math").save_to_disk(tmp_path / "c")
    for subject in ("Art", "Math"):
        datasets.DatasetDict({"validation": table(subject)}).save_to_disk(tmp_path / "d" / subject)
    expected = {"a": ["Art"], "b": ["Art", "Math"], "c": ["Math"], "d": ["Art", "Math"]}
    for name, subjects in expected.items():
        benchmark = load_benchmark(str(tmp_path / name), "validation", None)
        assert benchmark.subjects == subjects, name
        assert benchmark.rows[1].image(1) == png("red"), name
    with pytest.raises(UserError, match="no split 'test'; splits there: validation, dev"):
        load_benchmark(str(tmp_path / "a"), "test", None)


def test_a_saved_selection_keeps_rows_and_images_together(tmp_path: Path):
    mixed = table("Art").select([2, 0])
    mixed.save_to_disk(tmp_path / "s")
    rows = load_benchmark(str(tmp_path / "s"), "validation", None).rows
    assert [(row.sample_id, row.present) for row in rows] == [
        ("validation_Art_2", (1, 2)),
        ("validation_Art_0", (2,)),
    ]


def test_one_file_and_image_paths_relative_to_it(cases: Path):
    folder = cases / "12-mmmu-image-refs"
    by_path = load_benchmark(str(folder / "rows.jsonl"), "validation", None)
    by_bytes = load_benchmark(str(folder / "rows.parquet"), "validation", None)
    assert [row.present for row in by_path.rows] == [row.present for row in by_bytes.rows]
    assert by_path.rows[0].image(1).read_bytes() == by_bytes.rows[0].image(1)
    assert by_path.subjects == ["Selfmade"]


def test_the_checksum_sees_texts_and_pixels(per_subject: Path):
    before = load_benchmark(str(per_subject), "validation", ["Art"]).checksum()
    assert before == load_benchmark(str(per_subject), "validation", ["Art"]).checksum()
    rows = subject_rows("Art", 3)
    rows[2]["image_2"]["bytes"] = png("green")
    changed = datasets.Dataset.from_list(rows, features=FEATURES)
    changed.to_parquet(per_subject / "Art" / "validation-00000-of-00001.parquet")
    assert before != load_benchmark(str(per_subject), "validation", ["Art"]).checksum()


def test_unreadable_sources_say_which(tmp_path: Path, per_subject: Path):
    with pytest.raises(UserError, match="does not exist"):
        load_benchmark(str(tmp_path / "nowhere"), "validation", None)
    (per_subject / "Art" / "validation-00000-of-00001.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(UserError, match="cannot read the benchmark file") as caught:
        load_benchmark(str(per_subject), "validation", None)
    assert "Art/validation-00000-of-00001.parquet" in caught.value.where
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "A"}\n')
    with pytest.raises(UserError, match="columns missing: options"):
        load_benchmark(str(tmp_path / "rows.jsonl"), "validation", None)
    (tmp_path / "twice.jsonl").write_text(
        '{"id": "1", "question": "q", "options": "[]", "answer": "A"}\n' * 2
    )
    with pytest.raises(UserError, match="ids come more than once: 1"):
        load_benchmark(str(tmp_path / "twice.jsonl"), "validation", None)


def test_the_hub_without_a_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot read the dataset from the Hub"):
        load_benchmark("nobody/no-such-dataset", "validation", None)
