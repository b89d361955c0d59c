"""The data report: numbers against hand counts, leaks, what to mend, and a page that needs no network."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import data_report
import numpy as np
import pytest
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.pages import bars, data_report_page
from odb_workflow.tmdb.report import build_report, histogram, length_edges, quantities, random_batch_padding
from odb_workflow.tmdb.store import RecordStore
from odb_workflow.tmdb.validate import validate_tmdb
from PIL import Image
from tmdb_helpers import cached_processor, record, write_tmdb

SPLIT = {"mode": "lf_val_size", "val_size": 0.25, "split_seed": 42, "train_size": 0, "val_start": None}


@pytest.fixture
def report(tmp_path: Path, tiny_model_dir: Path):
    """``report(records, split)`` writes, validates with drop, and reports."""

    def run(records: list, split: dict | None = None, **options):
        data = write_tmdb(tmp_path / "d", records)
        options = {"on_bad_record": "drop", "max_bad_fraction": 0.9, "max_length": 4096, **options}
        processor = cached_processor(tiny_model_dir)
        validate_tmdb(data, processor, output_dir=tmp_path / "v", processes=1, progress=False, **options)
        return build_report(RecordStore(data), tmp_path / "v", split or SPLIT)

    return run


def picture(folder: Path, name: str, color: int) -> str:
    path = folder / "d" / "images" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 32 + color), (color, 0, 0)).save(path)
    return f"images/{name}"


def test_counts_by_hand(report, tmp_path: Path) -> None:
    records = [record(n, ["images/ok.png"], source="a" if n < 6 else "b") for n in range(8)]
    records += [record(8, source="b", turns=[("human", "q"), ("gpt", "")])]
    result = report(records)
    by_name = {row["source"]: row for row in result["sources"]}
    assert (result["status"], result["records"], result["accepted"], result["rejected"]) == (
        "passed",
        9,
        8,
        1,
    )
    assert (by_name["a"]["records"], by_name["b"]["records"], by_name["b"]["rejected"]) == (6, 3, 1)
    assert sum(row["training"] + row["validation"] for row in result["sources"]) == 8
    assert result["images"]["count"] == 8 and result["images"]["distinct"] == 1
    assert result["images"]["width"]["min"] == result["images"]["width"]["max"] == 64
    length = result["lengths"]["max"]
    assert result["lengths"]["sum"] == 8 * length and result["lengths"]["cv"] == 0
    assert result["image_share"] == pytest.approx(4 / length)  # 64x64 pixels are 4 tokens
    assert result["label_share"] == pytest.approx(result["label_tokens"] / (8 * length))
    assert sum(result["lengths"]["histogram"]) == 8
    assert sum(sum(row["histogram"]) for row in result["sources"]) == 8


def test_quantities_histogram_and_padding_by_hand() -> None:
    assert quantities(np.array([1, 3]))["cv"] == 0.5
    assert quantities(np.array([])) == {"count": 0, "sum": 0}
    lengths = np.array([1, 10, 100, 1000])
    edges = length_edges(lengths)
    assert edges[0] == 1 and edges[-1] == 1001 and sum(histogram(lengths, edges)) == 4
    assert sum(histogram(np.array([7, 7]), length_edges(np.array([7, 7])))) == 2
    assert random_batch_padding(np.array([10, 10, 10, 10]), 2) == 0
    assert random_batch_padding(np.array([1, 3]), 2) == pytest.approx(1 - 4 / 6)
    assert random_batch_padding(np.array([1]), 2) is None


def test_leaks_of_pictures_records_and_nothing_else(report, tmp_path: Path) -> None:
    order = np.random.default_rng(42).permutation(8)
    validation, train = order[:2].tolist(), order[2:].tolist()
    paths = {row: [picture(tmp_path, f"{row}.png", row)] for row in range(8)}
    shared = picture(tmp_path, "copy.bmp", validation[0])  # other file, equal pixels
    paths[train[1]] = [shared]
    records = [record(row, paths[row], [("human", f"<image>{row}"), ("gpt", "a")]) for row in range(8)]
    leaks = report(records)["leaks"]
    assert leaks["images"]["distinct"] == 1 and leaks["images"]["validation_records"] == 1
    assert leaks["images"]["training_records"] == 1 and leaks["images"]["validation_share"] == 0.5
    example = leaks["images"]["examples"][0]
    assert example["training"] == [{"id": f"r-{train[1]:05d}", "file": "images/copy.bmp"}]
    assert example["validation"] == [{"id": f"r-{validation[0]:05d}", "file": paths[validation[0]][0]}]
    assert leaks["identical_records"]["distinct"] == 0 and leaks["ids"]["distinct"] == 0

    records[train[1]] = record(train[1], [shared], [("human", f"<image>{validation[0]}"), ("gpt", "a")])
    assert report(records)["leaks"]["identical_records"] == {"distinct": 1, "validation_records": 1}
    grouped = report(records, {**SPLIT, "mode": "grouped"})["leaks"]
    assert grouped["images"]["distinct"] == grouped["identical_records"]["distinct"] == 0


def test_text_only_data(report) -> None:
    result = report([record(n) for n in range(8)])
    assert result["images"] == {"count": 0, "distinct": 0} and result["image_share"] == 0
    assert "No accepted record has an image." in data_report_page(result)


def test_train_size_counts_only_what_is_used(report) -> None:
    result = report([record(n) for n in range(12)], {**SPLIT, "train_size": 4})
    assert result["split"]["training"] == 4 and result["split"]["validation"] == 3


def test_rejects_say_how_to_mend(report) -> None:
    records = [record(n) for n in range(8)] + [record(n, ["images/no.png"]) for n in (8, 9)]
    group = report(records)["rejects"]["reasons"][0]
    assert (group["reason"], group["count"], group["fix"]) == ("missing_file", 2, "add the file")
    assert group["shown"][1] == {
        "id": "r-00009",
        "line": 10,
        "source": "made",
        "file": "images/no.png",
        "detail": "no such file",
    }


def test_files_to_mend_are_listed_once_each(report) -> None:
    records = [record(n) for n in range(90)] + [record(n, ["images/no.png"]) for n in (90, 91)]
    records += [record(92, ["images/gone.png", "images"], [("human", "<image><image>q"), ("gpt", "a")])]
    records += [record(93, 0, [("human", "q"), ("gpt", " ")])]
    result = report(records)
    assert result["rejects"]["file_count"] == 3
    assert [(item["file"], item["reason"], item["count"]) for item in result["rejects"]["files"]] == [
        ("images/no.png", "missing_file", 2),
        ("images", "not_a_file", 1),
        ("images/gone.png", "missing_file", 1),
    ]
    page = data_report_page(result)
    assert "Image files at fault: 3" in page
    assert page.index("Image files at fault") < page.index("All faults by reason")
    text_only = data_report_page(report([record(n) for n in range(90)] + records[-1:]))
    assert "Image files at fault" not in text_only and '<th class="text">file</th>' not in text_only


def test_page_is_one_file_with_escaped_text(report) -> None:
    evil = "<script>alert(1)</script>"
    records = [record(n, source=f"a & {evil}") for n in range(8)]
    records += [record(evil, ["images/<b>no.png"], source="b")]
    page = data_report_page(report(records))
    assert "<script" not in page and "&lt;script&gt;" in page and "images/&lt;b&gt;no.png" in page
    assert not re.search(r'(src|href)="(?!data:)', page) and "@import" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_stopped_validation_is_reported(report, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="report"):
        report([record(0), record(1, ["images/no.png"])], on_bad_record="error")
    result = build_report(RecordStore(tmp_path / "d"), tmp_path / "v", SPLIT)
    assert result["status"] == "stopped" and "1 of 2 records" in result["stopped_because"]
    page = data_report_page(result)
    assert "images/no.png" in page and "r-00001" in page
    assert (tmp_path / "v" / "validation_failed" / "report.html").read_text() == page
    with pytest.raises(UserError, match="no finished validation"):
        build_report(RecordStore(tmp_path / "d"), tmp_path / "nothing", SPLIT)


def test_bars_have_one_title_per_bin() -> None:
    svg = bars([1, 0, 1500], [1, 2, 4, 1000])
    assert svg.count("<title>") == 3 and "4 to 1,000 tokens: 1,500 records" in svg


def test_program(report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report([record(n) for n in range(8)])
    command = ["data_report.py", "--data", str(tmp_path / "d"), "--validation", str(tmp_path / "v")]
    command += ["--output-dir", str(tmp_path / "r"), "--val-size", "0.25"]
    monkeypatch.setattr(sys, "argv", command)
    data_report.main()
    document = json.loads((tmp_path / "r" / "data_report.json").read_text())
    assert document["split"]["validation"] == 2 and document["code_version"] == data_report.CODE_VERSION
    assert (tmp_path / "r" / "data_report.html").read_text().startswith("<!DOCTYPE html>")
    monkeypatch.setattr(sys, "argv", [*command, "--val-size", "99"])
    with pytest.raises(UserError, match="none is left for training"):
        data_report.main()
