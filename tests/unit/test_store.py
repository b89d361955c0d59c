"""The offset index: right lines, checked against the file, safe in forked and started processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from odb_workflow.runtime.errors import UserError
from odb_workflow.runtime.files import sha256_file
from odb_workflow.tmdb.records import BadRecord
from odb_workflow.tmdb.store import INDEX_NAME, RecordStore, _scan
from tmdb_helpers import record, write_tmdb


def raw(folder: Path, content: bytes, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_bytes(content)
    (folder / "metadata.json").write_text(json.dumps({"num_records": count}))
    return folder


def line(number: int) -> bytes:
    return json.dumps(record(number)).encode()


def test_random_access(tmp_path: Path) -> None:
    store = RecordStore(write_tmdb(tmp_path / "d", [record(number) for number in range(50)]))
    assert len(store) == 50
    for row in (0, 49, 7, 0):
        assert store[row].id == f"r-{row:05d}"
    for row in (50, -1):
        with pytest.raises(IndexError):
            store[row]
    assert store.sha256 == sha256_file(tmp_path / "d" / "records.jsonl")


def test_line_ends_empty_lines_and_byte_order_mark(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + line(0) + b"\r\n\n  \t\n" + line(1) + b"\n\n" + line(2) + b"\n \n\n"
    store = RecordStore(raw(tmp_path / "d", content, 3))
    assert [store[row].id for row in range(3)] == ["r-00000", "r-00001", "r-00002"]
    assert [store.line_number(row) for row in range(3)] == [1, 4, 6]
    assert [json.loads(text)["id"] for text in store.read_lines(0, 3)] == ["r-00000", "r-00001", "r-00002"]


def test_leading_empty_lines(tmp_path: Path) -> None:
    store = RecordStore(raw(tmp_path / "d", b"\n\n" + line(4), 1))
    assert store[0].id == "r-00004" and store.line_number(0) == 3


def test_records_across_scan_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tmdb(tmp_path / "d", [record(number) for number in range(20)])
    whole = _scan(folder / "records.jsonl")
    for size in (1, 7, 64, 1 << 12):
        monkeypatch.setattr("odb_workflow.tmdb.store._CHUNK_BYTES", size)
        offsets, lines, digest = _scan(folder / "records.jsonl")
        assert offsets.tolist() == whole[0].tolist() and lines.tolist() == whole[1].tolist()
        assert digest == whole[2]


def test_index_is_reused_and_renewed_when_the_file_changes(tmp_path: Path) -> None:
    folder = write_tmdb(tmp_path / "d", [record(0), record(1)])
    RecordStore(folder)
    first = (folder / INDEX_NAME).stat().st_mtime_ns
    RecordStore(folder)
    assert (folder / INDEX_NAME).stat().st_mtime_ns == first
    write_tmdb(folder, [record(2), record(1), record(0)])
    store = RecordStore(folder)
    assert len(store) == 3 and store[0].id == "r-00002"


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not json\n" + b"\0" * 40, None])
def test_damaged_index_is_built_again(tmp_path: Path, damage: bytes | None) -> None:
    folder = write_tmdb(tmp_path / "d", [record(number) for number in range(5)])
    RecordStore(folder)
    whole = (folder / INDEX_NAME).read_bytes()
    (folder / INDEX_NAME).write_bytes(whole[:-8] if damage is None else damage)
    assert RecordStore(folder)[4].id == "r-00004"
    assert (folder / INDEX_NAME).read_bytes() == whole


def test_read_only_folder_keeps_the_index_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    folder = write_tmdb(tmp_path / "d", [record(0)])

    def refuse(*_args, **_kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("odb_workflow.tmdb.store.atomic_open", refuse)
    assert RecordStore(folder)[0].id == "r-00000"
    assert "Read-only file system" in caplog.text and not (folder / INDEX_NAME).exists()


def test_faults_of_the_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        RecordStore(tmp_path / "none")
    folder = raw(tmp_path / "d", line(0) + b"\n", 2)
    with pytest.raises(UserError, match="says num_records 2"):
        RecordStore(folder)
    (folder / "metadata.json").write_text('{"num_records": true}')
    with pytest.raises(UserError, match="says num_records True"):
        RecordStore(folder)
    (folder / "metadata.json").unlink()
    with pytest.raises(UserError, match="did not finish"):
        RecordStore(folder)
    with pytest.raises(UserError, match="no records"):
        RecordStore(raw(tmp_path / "empty", b"\n", 0))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "metadata.json").write_text('{"num_records": 1}')
    with pytest.raises(UserError, match="cannot open the records"):
        RecordStore(tmp_path / "half")


def test_byte_order_mark_in_the_metadata(tmp_path: Path) -> None:
    folder = raw(tmp_path / "d", line(0) + b"\n", 1)
    (folder / "metadata.json").write_text('{"num_records": 1}', encoding="utf-8-sig")
    assert len(RecordStore(folder)) == 1


def test_bad_record_is_named(tmp_path: Path) -> None:
    store = RecordStore(write_tmdb(tmp_path / "d", [record(0), b"{broken"]))
    with pytest.raises(BadRecord, match="broken_json") as caught:
        store[1]
    assert caught.value.row == 1


def _read(store: RecordStore, start: int, queue) -> None:
    queue.put([store[row % len(store)].id for row in range(start, start + 200)])


def test_one_open_store_in_several_forked_processes(tmp_path: Path) -> None:
    store = RecordStore(write_tmdb(tmp_path / "d", [record(number) for number in range(100)]))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_read, args=(store, start, queue)) for start in (0, 33, 66)]
    for worker in workers:
        worker.start()
    read = sorted(queue.get(timeout=30) for _ in workers)
    for worker in workers:
        worker.join()
    assert read == sorted(
        [f"r-{row % 100:05d}" for row in range(start, start + 200)] for start in (0, 33, 66)
    )


def test_pickle_holds_the_path_only(tmp_path: Path) -> None:
    store = RecordStore(write_tmdb(tmp_path / "d", [record(number) for number in range(300)]))
    data = pickle.dumps(store)
    assert len(data) < 1000 and pickle.loads(data)[299].id == "r-00299"


def test_opening_many_records_is_small(tmp_path: Path) -> None:
    short = line(0) + b"\n"
    folder = raw(tmp_path / "d", short * 206_526, 206_526)
    RecordStore(folder).close()
    tracemalloc.start()
    store = RecordStore(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == 206_526 and store[206_525].id == "r-00000"
    assert peak < 16 << 20  # two numbers a record and their check


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_records_that_are_no_regular_file(tmp_path: Path, make) -> None:
    folder = write_tmdb(tmp_path / "d", [record(0)])
    (folder / "records.jsonl").unlink()
    make(folder / "records.jsonl")
    with pytest.raises(UserError, match=r"records\.jsonl is not a regular file"):
        RecordStore(folder)


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    folder = write_tmdb(tmp_path / "d", [record(0), record(1)])
    store = RecordStore(folder)
    os.truncate(folder / "records.jsonl", 10)
    with pytest.raises(UserError, match="shorter"):
        store[1]
