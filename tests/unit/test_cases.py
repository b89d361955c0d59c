"""Every input case 01..10 through the validation: what it must report, name and keep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.accepted import AcceptedSet
from odb_workflow.tmdb.images import read_image
from odb_workflow.tmdb.store import RecordStore
from odb_workflow.tmdb.validate import validate_tmdb
from tmdb_helpers import cached_processor, reject_lines


@pytest.fixture
def check(cases: Path, tmp_path: Path, tiny_model_dir: Path):
    """``check(case, policy)`` validates and returns (accepted ids, {(id, reason)}, error or None)."""

    def run(case: str, policy: str = "error", max_length: int = 4096):
        output = tmp_path / f"out-{case}-{policy}"
        error = None
        try:
            validate_tmdb(
                cases / case,
                cached_processor(tiny_model_dir),
                max_length=max_length,
                output_dir=output,
                on_bad_record=policy,
                max_bad_fraction=0.9,
                processes=1,
                progress=False,
            )
        except UserError as caught:
            error = str(caught)
        accepted = [] if error else list(AcceptedSet.load(output).ids)
        return accepted, {(line["id"], line["reason"]) for line in reject_lines(output)}, error

    return run


def samples(folder: Path, model: Path, max_length: int = 4096):
    """{id: sample} of all records that pass."""
    store, processor = RecordStore(folder), SampleProcessor(cached_processor(model), max_length, folder)
    return {store[row].id: processor(store[row], row) for row in range(len(store))}


def answer(sample, model: Path) -> str:
    kept = sample["labels"][sample["labels"] != -100]
    return cached_processor(model).tokenizer.decode(kept)


def test_01_placeholder_count(check) -> None:
    bad = {"few-0001", "many-0001", "none-0001", "text-0001"}
    _, rejects, error = check("01-placeholder-count")
    assert rejects == {(name, "placeholder_count") for name in bad}
    for name, counts in {
        "few-0001": "1 placeholders <image>, 2 images",
        "many-0001": "2 placeholders <image>, 1 images",
        "none-0001": "0 placeholders <image>, 1 images",
        "text-0001": "1 placeholders <image>, 0 images",
    }.items():
        assert f"'{name}'" in error and counts in error
    accepted, _, error = check("01-placeholder-count", "drop")
    assert error is None and accepted == ["ok-0001", "turns-0001", "textonly-0001"]


def test_01_images_of_two_turns_stay_in_order(cases: Path, tiny_model_dir: Path) -> None:
    folder = cases / "01-placeholder-count"
    store = RecordStore(folder)
    row = next(row for row in (0, 5) if store[row].id == "turns-0001")
    processor = SampleProcessor(cached_processor(tiny_model_dir), 4096, folder)
    sample = processor(store[row], row)
    first = [processor.load_image(store[row], row, path) for path in ("images/a.png", "images/b.png")]
    expected = np.concatenate([processor._patches(item.image, item.size)[0].numpy() for item in first])
    assert np.array_equal(sample["pixel_values"].numpy(), expected)
    assert answer(sample, tiny_model_dir) == "Disc.<|im_end|>Square.<|im_end|>"


def test_02_extreme_aspect(check) -> None:
    _, rejects, error = check("02-extreme-aspect")
    assert rejects == {(name, "extreme_aspect") for name in ("wide-0001", "tall-0001", "edge-0001")}
    assert all(size in error for size in ("2010x1", "1x300", "1093x5"))
    accepted, _, error = check("02-extreme-aspect", "drop")
    assert error is None and accepted == ["ok-0001", "limit-0001"]


def test_03_exif_rotated(check, cases: Path, tiny_model_dir: Path) -> None:
    accepted, rejects, _ = check("03-exif-rotated")
    assert len(accepted) == 3 and not rejects
    folder = cases / "03-exif-rotated" / "images"
    upright = read_image(folder / "rot6.jpg")
    assert upright.size == upright.image.size == (48, 96) and "exif_orientation" in upright.notes
    red, _, blue = upright.image.getpixel((24, 10))
    assert red > 200 and blue < 60
    red, _, blue = read_image(folder / "rot3.jpg").image.getpixel((10, 24))
    assert red > 200 and blue < 60
    assert read_image(folder / "plain.jpg").size == (96, 48)
    grids = {
        name: sample["image_grid_thw"].tolist()
        for name, sample in samples(folder.parent, tiny_model_dir).items()
    }
    assert grids["rot6-0001"] == [[1, 6, 4]]  # 48x96 becomes 64x96: 4 patches wide, 6 high
    assert grids["plain-0001"] == [[1, 4, 6]]


def test_04_sixteen_bit(check, cases: Path) -> None:
    accepted, _, _ = check("04-sixteen-bit-png")
    assert len(accepted) == 4
    folder = cases / "04-sixteen-bit-png" / "images"
    pixels = {path.stem: np.asarray(read_image(path).image).astype(int) for path in folder.iterdir()}
    assert abs(pixels["g16"].mean() - 128) < 2
    for name in ("g16", "lowg16", "f32"):  # lowg16 by its 12-bit range, f32 by 0..1
        assert np.abs(pixels[name] - pixels["g8"]).max() <= 2


def test_05_broken_files(check) -> None:
    _, rejects, error = check("05-broken-files")
    assert rejects == {
        ("trunc-0001", "broken_image"),
        ("zero-0001", "broken_image"),
        ("html-0001", "broken_image"),
        ("missing-0001", "missing_file"),
        ("dir-0001", "not_a_file"),
    }
    for name in ("trunc.jpg", "zero.png", "html.jpg", "not-there.png", "adir"):
        assert f"images/{name}" in error
    accepted, _, error = check("05-broken-files", "drop")
    assert error is None and accepted == ["liar-0001"]


def test_06_role_order(check, cases: Path, tiny_model_dir: Path) -> None:
    bad = {
        ("systemmid-0001", "system_not_first"),
        ("unknown-0001", "unknown_role"),
        ("empty-0001", "no_answer"),
        ("humanonly-0001", "no_answer"),
    }
    _, rejects, error = check("06-role-order")
    assert rejects == bad and "turn 2 has role 'tool'" in error
    accepted, _, error = check("06-role-order", "drop")
    assert error is None
    store = RecordStore(cases / "06-role-order")
    processor = SampleProcessor(cached_processor(tiny_model_dir), 4096, store.data_dir)
    rows = AcceptedSet.load(cases.parent / "out-06-role-order-drop").rows
    answers = {store[row].id: answer(processor(store[row], row), tiny_model_dir) for row in rows.tolist()}
    assert list(answers) == accepted
    assert answers == {
        "ok-0001": "A red disc.<|im_end|>",
        "twohuman-0001": "A disc.<|im_end|>",
        "twogpt-0001": "A disc.<|im_end|>It is red.<|im_end|>",
        "gptfirst-0001": "Welcome.<|im_end|>A disc.<|im_end|>",
        "endshuman-0001": "A disc.<|im_end|>",
        "systemfirst-0001": "Disc.<|im_end|>",
        "alias-0001": "A disc.<|im_end|>",
    }


def test_07_empty_turns(check) -> None:
    _, rejects, error = check("07-empty-turns")
    names = ("noans-0001", "spaces-0001", "halfans-0001", "nullans-0001")
    assert rejects == {(name, "empty_answer") for name in names}
    assert all(name in error for name in names)
    accepted, _, _ = check("07-empty-turns", "drop")
    assert accepted == ["ok-0001", "noq-0001", "noqtext-0001"]


def test_08_over_length(check) -> None:
    _, rejects, error = check("08-over-length", max_length=512)
    names = ("cutvision-0001", "bigimage-0001", "cutanswer-0001")
    assert rejects == {(name, "over_length") for name in names}
    assert "tokens (784 of images), max_length is 512" in error
    accepted, _, _ = check("08-over-length", "drop", max_length=512)
    assert accepted == ["fits-0001"]


def test_09_line_separators(check, cases: Path) -> None:
    accepted, rejects, _ = check("09-jsonl-line-separators")
    assert len(accepted) == 6 and not rejects and accepted[-1] == "last-0001"
    store = RecordStore(cases / "09-jsonl-line-separators")
    texts = [store[row].turns[0].text for row in range(len(store))]
    assert len(store) == 6
    assert "\u2028" in texts[1] and "\u2029" in texts[2] and "\x85" in texts[3]


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_10_duplicate_ids(check, policy: str) -> None:
    accepted, rejects, error = check("10-duplicate-ids", policy)
    assert accepted == []
    assert rejects == {
        ("dup-0001", "duplicate_id"),
        ("dup-0002", "duplicate_id"),
        ("7", "duplicate_id"),
        (None, "missing_id"),
    }
    for lines in ("lines 1 and 2", "lines 3 and 4", "lines 5 and 6", "(line 11)"):
        assert lines in error
