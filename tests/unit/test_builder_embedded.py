"""The embedded builder: seven sources, the TMDB contract, the same data from the same seed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from odb_workflow.tmdb.builders.program import check_contract
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "dataset_builder" / "scripts" / "build_public_mm_mix.py"
SOURCES = {
    "aokvqa",
    "chinese_text_recognition",
    "iiit5k",
    "image_textualization",
    "orand_car_a",
    "sharegpt4o",
    "vqa_like",
}
# of `--sizes 60 --seed 3`; the same on every machine, so a change here means other data for every user
CHECKSUM = "13568688ade2f255eec45ecdc485d85b0bca7e6b5170e9fd299535877b2eaddc"


def build(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), "--output", str(output), *arguments], capture_output=True, text=True
    )


def records_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text("utf-8").split("\n") if line]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "tmdb"
    done = build(folder, "--sizes", "60", "--seed", "3")
    assert done.returncode == 0, done.stderr
    return folder


def test_contract_and_sources(built: Path) -> None:
    metadata = check_contract(built)
    assert metadata["num_records"] == 60
    assert set(metadata["sources"]) == SOURCES
    assert (metadata["builder"], metadata["seed"]) == ("embedded-mm-mix", 3)
    records = records_of(built)
    assert {record["source"] for record in records} == SOURCES
    assert len({record["id"] for record in records}) == 60
    for record in records:
        turns = record["conversations"]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
        assert sum(turn["value"].count("<image>") for turn in turns) == len(record["images"])
        assert all(turn["value"] for turn in turns)
        assert record["upstream"]["dataset"]
        for name in record["images"]:
            with Image.open(built / name) as image:
                image.load()


def test_checksum_is_the_known_one(built: Path) -> None:
    assert json.loads((built / "metadata.json").read_text())["checksum"] == CHECKSUM


def test_checksum_depends_on_pixels_not_on_compression(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "dataset_builder"))
    try:
        from odb_mm_mix.record import Item, Picture
        from odb_mm_mix.writer import write_tmdb
    finally:
        sys.path.remove(str(ROOT / "dataset_builder"))
    pixels = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    checksums = []
    for level in (0, 9):
        file = tmp_path / f"{level}.png"
        Image.fromarray(pixels).save(file, compress_level=level)
        item = Item(["<image>\nwhat?", "that"], [Picture("images/a.png", file=file)])
        made = write_tmdb([("vqa_like", 0, item)], tmp_path / f"t{level}", seed=1, overwrite=False)
        checksums.append(made["checksum"])
    changed = pixels.copy()
    changed[0, 0, 0] ^= 1
    item = Item(["<image>\nwhat?", "that"], [Picture("images/a.png", changed)])
    checksums.append(write_tmdb([("vqa_like", 0, item)], tmp_path / "c", seed=1, overwrite=False)["checksum"])
    assert checksums[0] == checksums[1] != checksums[2]


def test_another_seed_gives_other_data_and_a_size_leaves_other_sources_alone(
    built: Path, tmp_path: Path
) -> None:
    assert build(tmp_path / "b", "--sizes", "60", "--seed", "4").returncode == 0
    assert json.loads((tmp_path / "b" / "metadata.json").read_text())["checksum"] != CHECKSUM
    sizes = dict(json.loads((built / "metadata.json").read_text())["sources"], vqa_like=5)
    assert build(tmp_path / "c", "--sizes", json.dumps(sizes), "--seed", "3").returncode == 0
    before = {record["id"]: record for record in records_of(built) if record["source"] != "vqa_like"}
    after = {record["id"]: record for record in records_of(tmp_path / "c") if record["source"] != "vqa_like"}
    assert before == after


def test_letters_name_the_right_option_and_the_answer_is_easy_vqas(built: Path) -> None:
    import easy_vqa

    texts, answers, _ = easy_vqa.get_train_questions()
    seen = 0
    for record in records_of(built):
        if record["source"] != "aokvqa":
            continue
        lines = record["conversations"][0]["value"].split("\n")
        options = {line[1]: line[4:] for line in lines if line.startswith("(")}
        index = record["upstream"]["question"]
        assert options[record["conversations"][1]["value"]] == answers[index]
        assert texts[index] in record["conversations"][0]["value"]
        assert lines[-1] == "Answer with the option letter only."
        seen += 1
    assert seen > 10


def test_overwrite_is_needed_and_wrong_sizes_are_named(built: Path) -> None:
    refused = build(built, "--sizes", "60")
    assert refused.returncode == 1 and "--overwrite" in refused.stderr
    for sizes, message in (
        ('{"vqa": 3}', "unknown source 'vqa'"),
        ('{"vqa_like": -1}', "at least 0"),
        ("3", "at least 7 records"),
        ("many", "neither a number nor JSON"),
        (json.dumps(dict.fromkeys(SOURCES, 0)), "all sizes are 0"),
    ):
        done = build(built.parent / "wrong", "--sizes", sizes)
        assert done.returncode == 1 and message in done.stderr
        assert not (built.parent / "wrong").exists()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_build_never_looks_finished(tmp_path: Path, kill: signal.Signals) -> None:
    output = tmp_path / "tmdb"
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "--output", str(output), "--overwrite", "--sizes", "200000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not any(folder.glob("records.jsonl") for folder in tmp_path.glob(".tmdb.*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, kill)
    process.wait(timeout=30)
    assert not output.exists()
    if kill == signal.SIGTERM:
        assert list(tmp_path.iterdir()) == []
    assert build(output, "--overwrite", "--sizes", "20").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tmdb"]


def test_every_character_has_its_own_shape() -> None:
    sys.path.insert(0, str(ROOT / "dataset_builder"))
    try:
        from odb_mm_mix.strokes import CHARACTERS, draw_character
    finally:
        sys.path.remove(str(ROOT / "dataset_builder"))
    masks = {draw_character(character).tobytes() for character in CHARACTERS}
    assert len(masks) == len(CHARACTERS) == 30


def test_the_test_part_of_easy_vqa_is_never_used(built: Path) -> None:
    text = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "dataset_builder" / "odb_mm_mix").glob("*.py")
    )
    assert "get_test" not in text
