"""The validation pass: policies, equal outputs for any number of processes, all faults listed, clean ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.accepted import AcceptedSet
from odb_workflow.tmdb.pool import ordered_map
from odb_workflow.tmdb.store import RecordStore
from odb_workflow.tmdb.validate import validate_tmdb
from PIL import Image
from tmdb_helpers import cached_processor, record, reject_lines, write_tmdb

OUTPUTS = ("validation.json", "accepted.parquet", "rejects.jsonl")
NO_QUESTION = [("human", "hello"), ("gpt", "a")]


@pytest.fixture
def validate(tiny_model_dir: Path, tmp_path: Path):
    def run(data: Path, output: Path | None = None, **options):
        options = {"max_length": 4096, "processes": 1, "progress": False, **options}
        output = output or tmp_path / "out"
        return validate_tmdb(data, cached_processor(tiny_model_dir), output_dir=output, **options)

    return run


def mixed(folder: Path, count: int, bad_every: int) -> tuple[Path, list[int]]:
    """A TMDB in which every ``bad_every``-th record has one of four faults; returns the bad rows too."""
    records, bad = [], []
    for number in range(count):
        if number % bad_every == bad_every - 1:
            bad.append(number)
            records.append(
                [
                    record(number, ["images/none.png"]),
                    record(number, 0, [("human", "q"), ("gpt", " ")]),
                    record(number, 1, [("human", "no marker"), ("gpt", "a")]),
                    record(number, 0, [("human", "q<|im_end|>"), ("gpt", "a")]),
                ][len(bad) % 4]
            )
        else:
            records.append(record(number, number % 3, source=f"source-{number % 2}"))
    return write_tmdb(folder, records), bad


def test_accepted_set_equals_the_samples(
    validate, tiny_tmdb: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    result = validate(tiny_tmdb)
    accepted = AcceptedSet.load(tmp_path / "out")
    store = RecordStore(tiny_tmdb)
    assert result.records == result.accepted == len(accepted) == accepted.n_records == len(store)
    samples = SampleProcessor(cached_processor(tiny_model_dir), 4096, tiny_tmdb)
    columns = {name: accepted.column(name) for name in ("image_tokens", "patches")}
    for row in range(len(store)):
        sample = samples(store[row], row)
        assert accepted.lengths[row] == len(sample["input_ids"])
        assert accepted.label_tokens[row] == int((sample["labels"][1:] != -100).sum())
        assert columns["image_tokens"][row] == int(sample["mm_token_type_ids"].sum())
        assert columns["patches"][row] == sample["odb_n_patches"]
        assert (accepted.ids[row], accepted.sources[row]) == (store[row].id, store[row].source)
    by_source = result.info["by_source"]
    assert sum(counts["length"] for counts in by_source.values()) == int(accepted.lengths.sum())
    accepted.check_store(store)
    accepted.check_processor(cached_processor(tiny_model_dir), 4096)


def test_same_bytes_for_any_number_of_processes(validate, tmp_path: Path) -> None:
    data, bad = mixed(tmp_path / "d", 300, 50)
    outputs = {}
    for processes in (1, 2, 3):
        folder = tmp_path / f"out-{processes}"
        result = validate(data, folder, on_bad_record="drop", processes=processes)
        assert (result.accepted, result.rejected) == (300 - len(bad), len(bad))
        outputs[processes] = [(folder / name).read_bytes() for name in OUTPUTS]
    assert outputs[1] == outputs[2] == outputs[3]


def test_drop_keeps_the_rest_and_takes_rejects_out_of_both_parts(validate, tmp_path: Path) -> None:
    data, bad = mixed(tmp_path / "d", 200, 20)
    info = validate(data, on_bad_record="drop").info
    assert info["rejected"] == 10 and info["rejected_by_reason"] == {
        "empty_answer": 3,
        "missing_file": 2,
        "placeholder_count": 3,
        "special_token": 2,
    }
    accepted = AcceptedSet.load(tmp_path / "out")
    assert sorted(set(range(200)) - set(accepted.rows.tolist())) == bad
    split = accepted.split(val_size=0.2, train_size=30)
    order = np.random.default_rng(42).permutation(200)
    assert accepted.validation_rows(split).tolist() == [row for row in order[:40] if row not in bad]
    assert accepted.training_rows(split).tolist() == [row for row in order[40:] if row not in bad][:30]
    rejects = reject_lines(tmp_path / "out")
    assert [line["row"] for line in rejects] == bad
    assert set(rejects[0]) == {"row", "line", "id", "source", "reason", "detail", "file"}
    assert {line["file"] for line in rejects} == {"images/none.png", None}


def test_too_many_bad_records_stop_under_drop(validate, tmp_path: Path) -> None:
    data, bad = mixed(tmp_path / "d", 100, 10)
    assert validate(data, on_bad_record="drop", max_bad_fraction=0.1).rejected == len(bad) == 10
    with pytest.raises(
        UserError, match=r"10 of 100 records \(10.0%\) are at fault, max_bad_fraction is 0.09"
    ):
        validate(data, on_bad_record="drop", max_bad_fraction=0.09)
    assert not any((tmp_path / "out" / name).exists() for name in OUTPUTS)


def test_error_lists_every_fault_of_every_record(validate, tmp_path: Path) -> None:
    data, bad = mixed(tmp_path / "d", 100, 10)
    with pytest.raises(UserError) as caught:
        validate(data)
    assert all(f"'r-{row:05d}' (line {row + 1})" in str(caught.value) for row in bad)
    assert "rejects.jsonl lists all 10" in str(caught.value)
    assert [line["row"] for line in reject_lines(tmp_path / "out")] == bad
    failed = json.loads((tmp_path / "out" / "validation_failed" / "validation.json").read_text())
    assert failed["rejected"] == 10 and "10 of 100" in failed["stopped_because"]
    with pytest.raises(UserError, match="no finished validation"):
        AcceptedSet.load(tmp_path / "out")


def test_several_faults_of_one_record_are_all_listed(validate, tmp_path: Path) -> None:
    (tmp_path / "d" / "images").mkdir(parents=True)
    (tmp_path / "d" / "images" / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    bad = record(
        "x", ["images/cut.png", "images/no.png"], [("human", "<|im_end|>"), ("tool", "t"), ("gpt", "")]
    )
    with pytest.raises(UserError):
        validate(write_tmdb(tmp_path / "d", [record(0), bad]))
    lines = reject_lines(tmp_path / "out")
    assert [line["reason"] for line in lines] == [
        "unknown_role",
        "empty_answer",
        "placeholder_count",
        "broken_image",
        "missing_file",
        "special_token",
    ]
    assert {line["id"] for line in lines} == {"x"} and {line["line"] for line in lines} == {2}


def test_many_bad_records_are_counted_beyond_those_named(validate, tmp_path: Path) -> None:
    data, _ = mixed(tmp_path / "d", 120, 2)
    with pytest.raises(UserError, match="and 10 more faults"):
        validate(data)
    assert len(reject_lines(tmp_path / "out")) == 60


@pytest.mark.parametrize("policy", ["error", "drop"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{broken", "broken_json"),
        (record(3), "duplicate_id"),
        ({**record(3), "id": 3.5}, "missing_id"),
        (record("esc", ["../x.png"]), "path_outside"),
        (record("esc", ["/etc/hostname"]), "path_outside"),
        (record("esc", ["https://example.com/x.png"]), "path_outside"),
    ],
)
def test_faults_that_stop_under_every_policy(validate, tmp_path: Path, policy: str, bad, reason: str) -> None:
    data = write_tmdb(tmp_path / "d", [record(number) for number in range(50)] + [bad])
    with pytest.raises(UserError, match=f"{reason} stop under every policy") as caught:
        validate(data, on_bad_record=policy, max_bad_fraction=1.0)
    assert "on_bad_record to drop" not in str(caught.value)
    assert {line["reason"] for line in reject_lines(tmp_path / "out")} == {reason}


def test_duplicates_far_apart_name_all_lines(validate, tmp_path: Path) -> None:
    records = [record(number) for number in range(200)]
    records[10]["id"] = records[190]["id"] = records[100]["id"] = "same"
    with pytest.raises(UserError, match="the id stands on lines 11 and 101 and 191"):
        validate(write_tmdb(tmp_path / "d", records), processes=2)


def test_checksum_follows_every_byte(validate, tmp_path: Path) -> None:
    data = write_tmdb(tmp_path / "d", [record(number, 1) for number in range(5)])
    first = validate(data).info["data_checksum"]
    assert validate(data).info["data_checksum"] == first
    Image.new("RGB", (64, 64), (254, 0, 0)).save(data / "images" / "ok.png")
    assert validate(data).info["data_checksum"] != first
    write_tmdb(data, [record(number, 1, upstream={"x": 1}) for number in range(5)])
    assert validate(data).info["data_checksum"] != first


def test_old_results_never_stand_beside_a_failure(validate, tmp_path: Path) -> None:
    data = write_tmdb(tmp_path / "d", [record(0), record(1)])
    validate(data)
    write_tmdb(data, [record(0), record(1, 0, [("human", "q")])])
    with pytest.raises(UserError):
        validate(data)
    assert not any((tmp_path / "out" / name).exists() for name in OUTPUTS)
    write_tmdb(data, [record(0), record(2)])
    validate(data)
    assert all((tmp_path / "out" / name).exists() for name in OUTPUTS)
    assert not (tmp_path / "out" / "validation_failed").exists()


def test_other_data_or_processor_is_noticed(validate, tmp_path: Path, tiny_model_dir: Path) -> None:
    data = write_tmdb(tmp_path / "d", [record(0), record(1)])
    validate(data)
    accepted = AcceptedSet.load(tmp_path / "out")
    for processor, length in (
        (cached_processor(tiny_model_dir), 4097),
        (cached_processor(tiny_model_dir, 2048), 4096),
    ):
        with pytest.raises(UserError, match="another processor, image size or max_length"):
            accepted.check_processor(processor, length)
    with pytest.raises(UserError, match="other data"):
        accepted.check_store(RecordStore(write_tmdb(tmp_path / "e", [record(0), record(3)])))
    with pytest.raises(UserError, match="did not accept"):
        accepted.positions(np.array([1, 2]))


def test_a_part_without_accepted_records_is_an_error(validate, tmp_path: Path) -> None:
    records = [record(number) for number in range(30)]
    for row in np.random.default_rng(42).permutation(30)[:1]:
        records[row] = record(int(row), 0, [("human", "q"), ("gpt", "")])
    validate(write_tmdb(tmp_path / "d", records), on_bad_record="drop")
    accepted = AcceptedSet.load(tmp_path / "out")
    with pytest.raises(UserError, match="validation part of the split holds no accepted record"):
        accepted.validation_rows(accepted.split(val_size=1 / 30))


def test_grouped_split_keeps_equal_pictures_together(validate, tmp_path: Path) -> None:
    data = tmp_path / "d"
    (data / "images").mkdir(parents=True)
    for number in range(20):  # two files of equal pixels for each picture
        picture = Image.new("RGB", (64, 64), (number, 10, 10))
        picture.save(data / "images" / f"{number}-a.png")
        picture.save(data / "images" / f"{number}-b.bmp")
    paths = [[f"images/{number % 20}-{'a.png' if number < 20 else 'b.bmp'}"] for number in range(40)]
    validate(write_tmdb(data, [record(number, path) for number, path in enumerate(paths)]))
    accepted = AcceptedSet.load(tmp_path / "out")
    split = accepted.split("grouped", 0.2)
    pictures = [{row % 20 for row in part.tolist()} for part in (split.train, split.validation)]
    assert len(split.validation) == 8 and not pictures[0] & pictures[1]


def test_notes_tell_what_was_done_to_images_and_texts(validate, tmp_path: Path) -> None:
    data = tmp_path / "d"
    (data / "images").mkdir(parents=True)
    Image.new("RGBA", (64, 64), (1, 2, 3, 4)).save(data / "images" / "clear.png")
    Image.fromarray(np.full((64, 64), 5000, dtype=np.uint16)).save(data / "images" / "deep.png")
    long = record("long", 0, [("human", "q"), ("gpt", "word " * 4000)])
    silent = record("silent", 0, [("human", " "), ("gpt", "a")])
    records = [record(0, ["images/clear.png"]), record(1, ["images/deep.png"]), long, silent]
    info = validate(write_tmdb(data, records), max_length=100).info
    assert info["notes"] == {
        "cut_to_max_length": 1,
        "empty_question": 1,
        "high_bit_depth_scaled": 1,
        "transparency_flattened": 1,
    }
    assert AcceptedSet.load(tmp_path / "out").lengths.max() == 100


@pytest.mark.parametrize(
    "options", [{"on_bad_record": "ignore"}, {"max_bad_fraction": 1.5}, {"max_length": 1}]
)
def test_wrong_options(validate, tmp_path: Path, options: dict) -> None:
    with pytest.raises(UserError):
        validate(write_tmdb(tmp_path / "d", [record(0)]), **options)


def test_row_groups_bound_the_memory(validate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odb_workflow.tmdb.validate._ROW_GROUP_ROWS", 100)
    validate(write_tmdb(tmp_path / "d", [record(number) for number in range(350)]))
    assert pq.ParquetFile(tmp_path / "out" / "accepted.parquet").metadata.num_row_groups == 4


def test_no_more_than_a_few_tasks_are_in_flight() -> None:
    started = []

    def tasks():
        for number in range(100):
            started.append(number)
            yield number

    results = ordered_map(lambda number: number * 2, tasks(), 2)
    for position, value in enumerate(results):
        assert value == position * 2 and len(started) - position <= 7


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    def die(number: int) -> int:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(UserError, match="worker process was killed"):
        list(ordered_map(die, range(50), 2))


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def stop(command: list[str], number: int, log: Path) -> tuple[int, list[int]]:
    """Start, wait for two workers, send the signal; the exit status and the workers still alive."""
    with open(log, "w") as handle:
        # Where the tests themselves run in the background of a script, SIGINT is ignored, which is inherited.
        program = subprocess.Popen(
            command,
            stdout=handle,
            stderr=handle,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        workers: list[int] = []
        deadline = time.monotonic() + 100
        while len(workers) < 2 and program.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            workers = children(program.pid)
        assert len(workers) == 2, log.read_text()
        program.send_signal(number)
        status = program.wait(timeout=60)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(state(pid) != "Z" for pid in workers):
        time.sleep(0.1)
    return status, [pid for pid in workers if state(pid) != "Z"]


POOL = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from odb_workflow.runtime.errors import run_main
from odb_workflow.tmdb.pool import ordered_map

def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for _ in ordered_map(lambda number: time.sleep(0.2), range(10000), 2):
        pass

run_main(main)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_pool_leaves_no_process_when_its_program_is_stopped(
    tmp_path: Path, repository: Path, number: int, status: int
) -> None:
    command = [sys.executable, "-c", POOL, str(repository / "workflow_scripts")]
    assert stop(command, number, tmp_path / "log") == (status, [])


def test_program_that_is_stopped_leaves_no_process_and_no_result(
    tmp_path: Path, tiny_model_dir: Path, repository: Path
) -> None:
    data = tmp_path / "d"
    (data / "images").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(data / "images" / "noise.png")
    write_tmdb(data, [record(n, ["images/noise.png"] * 2) for n in range(4000)])
    script = repository / "workflow_scripts" / "validate_tmdb.py"
    command = [sys.executable, str(script), "--data", str(data), "--model", str(tiny_model_dir)]
    command += ["--output-dir", str(tmp_path / "out"), "--workers", "2"]
    assert stop(command, signal.SIGTERM, tmp_path / "log") == (143, [])
    assert not any((tmp_path / "out" / name).exists() for name in OUTPUTS)


def state(pid: int) -> str:
    """One letter; Z where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
