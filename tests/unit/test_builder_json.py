"""TMDBs from LLaVA and ShareGPT files with an image folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.builders.json_files import build_from_json, read_records
from odb_workflow.tmdb.builders.program import check_contract
from PIL import Image

LLAVA = [
    {
        "id": 7,
        "image": "a/red.png",
        "conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "x\u2028y"}],
    },
    {"id": 8, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
]
SHAREGPT = [
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "<image><image>compare"},
            {"role": "assistant", "content": "same"},
        ],
        "images": ["a/red.png", "missing.png"],
    }
]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(folder / "a" / "red.png")
    return folder


def build(tmp_path: Path, *sources: dict) -> list[dict]:
    file = tmp_path / "sources.yaml"
    file.write_text(yaml.safe_dump({"sources": list(sources)}))
    folder = tmp_path / "tmdb"
    folder.mkdir(exist_ok=True)
    build_from_json(file, folder)
    check_contract(folder)
    return [json.loads(line) for line in (folder / "records.jsonl").read_text("utf-8").split("\n") if line]


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("mode", ["copy", "hardlink"])
def test_llava_as_list_and_as_lines(tmp_path: Path, images: Path, lines: bool, mode: str) -> None:
    path = tmp_path / "llava.json"
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in LLAVA) if lines else json.dumps(LLAVA)
    path.write_text("\ufeff" + text, encoding="utf-8")
    records = build(tmp_path, {"name": "own", "path": str(path), "images": str(images), "place_images": mode})
    assert [record["images"] for record in records] == [["images/own/a/red.png"], []]
    assert records[0]["conversations"][1]["value"] == "x\u2028y"
    assert records[0]["upstream"] == {"file": "llava.json", "row": 0, "id": "7"}
    copy = tmp_path / "tmdb" / "images" / "own" / "a" / "red.png"
    assert copy.read_bytes() == (images / "a" / "red.png").read_bytes()
    assert copy.samefile(images / "a" / "red.png") is (mode == "hardlink")


def test_sharegpt_with_several_images_and_one_that_is_missing(tmp_path: Path, images: Path) -> None:
    path = tmp_path / "share.jsonl"
    path.write_text("\n".join(map(json.dumps, SHAREGPT)))
    records = build(tmp_path, {"name": "share", "path": str(path), "images": str(images)})
    assert [turn["from"] for turn in records[0]["conversations"]] == ["system", "human", "gpt"]
    assert records[0]["images"] == ["images/share/a/red.png", "images/share/missing.png"]
    assert not (tmp_path / "tmdb" / "images" / "share" / "missing.png").exists(), "validation will name it"


def test_an_absolute_path_inside_the_folder_is_made_relative(tmp_path: Path, images: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([LLAVA[0] | {"image": str(images / "a" / "red.png")}]))
    records = build(tmp_path, {"name": "own", "path": str(path), "images": str(images)})
    assert records[0]["images"] == ["images/own/a/red.png"]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("../secret.png", "leaves its folder"),
        ("/etc/passwd", "lies outside"),
        ("https://example.org/a.png", "is an address"),
        (3, "is int, not a path"),
    ],
)
def test_images_outside_the_folder_are_refused(
    tmp_path: Path, images: Path, image: object, message: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([LLAVA[1], LLAVA[0] | {"image": image}]))
    with pytest.raises(UserError, match=f"record 1 cannot be read(.|\n)*{message}"):
        build(tmp_path, {"name": "own", "path": str(path), "images": str(images)})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        list(read_records(bad))
    bad.write_text("[1, 2")
    with pytest.raises(UserError, match="not a readable JSON file"):
        list(read_records(bad))
    with pytest.raises(UserError, match="does not exist"):
        list(read_records(tmp_path / "none.json"))
    bad.write_text("[]")
    with pytest.raises(UserError, match="no record"):
        build(tmp_path, {"name": "own", "path": str(bad)})
    bad.write_text('["text"]')
    with pytest.raises(UserError, match="record 0 is no object but str"):
        build(tmp_path, {"name": "own", "path": str(bad)})
