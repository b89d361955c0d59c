"""TMDBs from data sets on disk in the layouts that the Hub has, and what happens when the network fails."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.builders.hub import build_from_datasets, is_passing_fault
from odb_workflow.tmdb.builders.program import check_contract
from odb_workflow.tmdb.builders.rows import RowError, conversation_of
from odb_workflow.tmdb.builders.sources import Columns, HubSource, HubSources, load_sources
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


def picture(color: str) -> dict:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(stream, format="PNG")
    return {"bytes": stream.getvalue(), "path": f"{color}.png"}


def build(tmp_path: Path, *sources: dict, **more) -> list[dict]:
    file = tmp_path / "sources.yaml"
    file.write_text(yaml.safe_dump({"sources": list(sources)}))
    folder = tmp_path / "tmdb"
    folder.mkdir(exist_ok=True)
    build_from_datasets(file, folder, **more)
    check_contract(folder)
    return [json.loads(line) for line in (folder / "records.jsonl").read_text("utf-8").split("\n") if line]


def llava_rows() -> list[dict]:
    return [
        {
            "id": f"row{index}",
            "image": picture(color) if color else None,
            "conversations": [
                {"from": "human", "value": "<image>\nwhat?" if color else "hello"},
                {"from": "gpt", "value": color or "hi"},
            ],
        }
        for index, color in enumerate(["red", "blue", None, "red"])
    ]


def write_parquet(rows: list[dict], path: Path, **features) -> None:
    from datasets import Dataset, Features

    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows, features=Features(features)).to_parquet(path)


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """A folder as a Hub repository has it: subset folders are left out, one train split in parquet."""
    from datasets import Image as ImageFeature
    from datasets import List, Value

    path = tmp_path / "llava" / "train-00000-of-00001.parquet"
    turns = List({"from": Value("string"), "value": Value("string")})
    write_parquet(llava_rows(), path, id=Value("string"), image=ImageFeature(), conversations=turns)
    return path.parent


def test_llava_rows(llava: Path, tmp_path: Path) -> None:
    records = build(tmp_path, {"name": "ov", "path": str(llava)})
    assert [record["id"] for record in records] == [f"ov-{index:07d}" for index in range(4)]
    assert [len(record["images"]) for record in records] == [1, 1, 0, 1]
    assert records[0]["images"] == records[3]["images"], "equal pictures are stored once"
    assert records[0]["conversations"][0] == {"from": "human", "value": "<image>\nwhat?"}
    assert records[1]["upstream"]["id"] == "row1" and records[1]["upstream"]["row"] == 1
    data = (tmp_path / "tmdb" / records[0]["images"][0]).read_bytes()
    assert data == picture("red")["bytes"], "the bytes are those of the data set, not encoded again"
    metadata = json.loads((tmp_path / "tmdb" / "metadata.json").read_text())
    assert metadata["sources"] == {"ov": 4} and metadata["builder"] == "hub"
    assert str(Path.home()) not in json.dumps(metadata)


def test_finevision_rows_a_single_file_and_a_limit(tmp_path: Path) -> None:
    from datasets import Image as ImageFeature
    from datasets import List, Value

    rows = [
        {
            "images": [picture("red"), picture("blue")],
            "texts": [{"user": "compare", "assistant": "differ"}, {"user": "and?", "assistant": "no"}],
        },
        {"images": [], "texts": [{"user": "hi", "assistant": "ho"}]},
        {"images": [picture("teal")], "texts": [{"user": "left out", "assistant": "by limit"}]},
    ]
    turns = List({"user": Value("string"), "assistant": Value("string")})
    write_parquet(rows, tmp_path / "fine.parquet", images=List(ImageFeature()), texts=turns)
    records = build(tmp_path, {"name": "fine", "path": str(tmp_path / "fine.parquet"), "limit": 2})
    assert len(records) == 2
    assert records[0]["conversations"] == [
        {"from": "human", "value": "<image>\n<image>\ncompare"},
        {"from": "gpt", "value": "differ"},
        {"from": "human", "value": "and?"},
        {"from": "gpt", "value": "no"},
    ]
    assert records[1]["images"] == []


def test_arrow_saved_by_datasets_with_splits(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict, Features, Value
    from datasets import Image as ImageFeature

    features = Features({"picture": ImageFeature(), "query": Value("string"), "label": Value("string")})
    rows = [{"picture": picture("red"), "query": "which color?", "label": "red"}]
    DatasetDict({"validation": Dataset.from_list(rows, features=features)}).save_to_disk(tmp_path / "saved")
    source = {"name": "s", "path": str(tmp_path / "saved"), "split": "validation"}
    source["columns"] = {"images": "picture"}
    records = build(tmp_path, source)
    assert records[0]["conversations"][0]["value"] == "<image>\nwhich color?"
    with pytest.raises(UserError, match="no split 'train', only validation"):
        build(tmp_path, source | {"split": "train"})


def test_image_folder_with_captions(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("red", "blue"):
        Image.new("RGB", (8, 8), name).save(folder / f"{name}.png")
    lines = [json.dumps({"file_name": f"{name}.png", "text": f"a {name} square"}) for name in ("red", "blue")]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    records = build(tmp_path, {"name": "photos", "path": str(folder), "prompt": "Describe it."})
    assert sorted(record["conversations"][1]["value"] for record in records) == [
        "a blue square",
        "a red square",
    ]
    assert records[0]["conversations"][0]["value"] == "<image>\nDescribe it."
    assert (tmp_path / "tmdb" / records[0]["images"][0]).is_file()


def test_shuffle_takes_other_rows_but_always_the_same(llava: Path, tmp_path: Path) -> None:
    source = {"name": "ov", "path": str(llava), "limit": 2, "shuffle_seed": 5}
    first = build(tmp_path, source)
    assert build(tmp_path, source) == first
    assert {record["upstream"]["id"] for record in first} != {"row0", "row1"}


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "expected"),
    [
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
            {},
            None,
            [("system", "s"), ("human", "<image>\nq")],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
                ]
            },
            {},
            None,
            [("human", "<image>\nq"), ("gpt", "a")],
        ),
        (
            {"question": "q", "choices": ["x", "y"], "answer": 1},
            {},
            None,
            [("human", "<image>\nq\n(A) x\n(B) y\nAnswer with the option letter only."), ("gpt", "B")],
        ),
        ({"q": "q", "answers": ["a", "b"]}, {"question": "q"}, None, [("human", "<image>\nq"), ("gpt", "a")]),
        ({"text": "caption"}, {}, "what?", [("human", "<image>\nwhat?"), ("gpt", "caption")]),
        (
            {"conversations": [{"from": "narrator", "value": "x"}]},
            {},
            None,
            [("narrator", "x")],
        ),
    ],
)
def test_forms_of_rows(row: dict, columns: dict, prompt: str | None, expected: list) -> None:
    turns = conversation_of(row, Columns(**columns), prompt, 1)
    assert [(turn["from"], turn["value"]) for turn in turns] == expected


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"a": 1}, {}, "neither a conversation nor a question with its answer; the columns are a"),
        ({"a": 1}, {"conversation": "b"}, "there is no column 'b'"),
        ({"messages": "text"}, {}, "not a list of turns"),
        ({"messages": [{"role": "user"}]}, {}, "neither .from, value. nor"),
        ({"question": "q", "choices": ["x"], "answer": 3}, {}, "none of the 1 choices"),
        ({"question": "q", "answers": []}, {}, "list of answers is empty"),
    ],
)
def test_rows_that_cannot_be_read(row: dict, columns: dict, message: str) -> None:
    with pytest.raises(RowError, match=message):
        conversation_of(row, Columns(**columns), None, 0)


def test_after_a_network_fault_the_stream_goes_on_behind_the_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODB_WORKFLOW_RETRY_SECONDS", "0")
    opened = []

    def open_rows(source: HubSource, start: int):
        opened.append(start)
        for number, row in enumerate(llava_rows()[start:], start):
            if len(opened) < 3 and number == 2 * len(opened):
                raise ConnectionResetError("connection reset")
            yield row

    records = build(tmp_path, {"name": "ov", "path": "owner/name"}, open_rows=open_rows)
    assert opened == [0, 2] and len(records) == 4
    assert len({record["upstream"]["id"] for record in records}) == 4

    def never(source: HubSource, start: int):
        raise TimeoutError("timed out")
        yield

    with pytest.raises(UserError, match="after 5 attempts"):
        build(tmp_path, {"name": "ov", "path": "owner/name"}, open_rows=never)


def test_what_counts_as_a_network_fault() -> None:
    class Answer(Exception):
        def __init__(self, status: int) -> None:
            self.response = type("Response", (), {"status_code": status})()

    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = ConnectionError()
    assert all(
        map(is_passing_fault, (ConnectionResetError(), TimeoutError(), Answer(503), Answer(429), wrapped))
    )
    assert not any(map(is_passing_fault, (Answer(404), Answer(401), FileNotFoundError(), ValueError())))


def test_what_is_not_there_is_named(llava: Path, tmp_path: Path) -> None:
    for source, message in (
        ({"path": str(tmp_path / "none")}, "does not exist"),
        ({"path": str(llava), "split": "test"}, "cannot be opened(.|\n)*split 'test'"),
        (
            {"path": str(llava), "columns": {"images": "photo"}},
            "no column 'photo'; the columns are id, image",
        ),
    ):
        with pytest.raises(UserError, match=message):
            build(tmp_path, {"name": "s", **source})


def test_the_list_of_sources_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "sources.yaml"
    for text, message in (
        ("sources: []", "sources: List should have at least 1 item"),
        ("sources: [{name: a, path: b, spilt: train}]", "sources.0.spilt: Extra inputs"),
        ("sources: [{name: a/b, path: b}]", "folder name"),
        ("sources: [{name: a, path: b}, {name: a, path: c}]", "stand twice: a"),
        ("sources: [", "not a YAML file"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            load_sources(file, HubSources)
    with pytest.raises(UserError, match="does not exist"):
        load_sources(tmp_path / "none.yaml", HubSources)


def test_the_example_list_has_the_seven_sources_and_says_whose_choice_it_is() -> None:
    file = ROOT / "config" / "sources-example.yaml"
    listed = load_sources(file, HubSources)
    assert [source.name for source in listed.sources] == [
        "aokvqa",
        "chinese_text_recognition",
        "iiit5k",
        "image_textualization",
        "orand_car_a",
        "sharegpt4o",
        "vqa_like",
    ]
    assert "this project's own choice" in file.read_text()
