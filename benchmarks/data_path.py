#!/usr/bin/env python3
"""The data path measured: validation, processing of samples, opening of a large dataset.

Makes a mixed set of records (many short questions on small pictures, a tail of long captions on large JPEGs),
and measures on it

* validation in records/s with 1 and 2 processes,
* processing in samples per second of one core, against decoding plus the processor called in the plainest
  way, record by record in turn,
* the same records with 1 % made faulty: validated with `drop` and reported in one go,
* opening a dataset of 206,526 records: time and memory of a fresh process,
* peak memory of the validation at a quarter and at the whole number of records.

    python benchmarks/data_path.py --records 20000

Results are appended to data_path.jsonl beside this file; data_path.md is written anew from the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "workflow_scripts"))

from data_path_records import SOURCES, make_dataset, spoil  # noqa: E402
from odb_workflow.runtime.errors import run_main  # noqa: E402
from odb_workflow.runtime.provenance import git_state, now, package_versions  # noqa: E402
from PIL import Image  # noqa: E402

MM_MIX_RECORDS = 206_526
MAX_LENGTH = 16384
IMAGE_MAX_PIXELS = 589_824


def make_processor(folder: Path) -> Any:
    """The processor of a tiny Qwen3-VL with a tokenizer trained on the records' texts."""
    from odb_workflow.model.embedded import build_processor, train_tokenizer
    from odb_workflow.model.load import set_image_max_pixels

    texts = [json.loads(line)["conversations"][1]["value"] for line in (folder / "records.jsonl").open()]
    processor = build_processor(train_tokenizer(texts[:2000], 2048))
    set_image_max_pixels(processor, IMAGE_MAX_PIXELS)
    return processor


def cpu_seconds() -> float:
    """User and system time of this process and its ended children."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure_validation(data: Path, processor: Any, work: Path) -> list[dict[str, Any]]:
    """Records/s by wall clock and by CPU time, 1 and 2 processes."""
    from odb_workflow.tmdb.validate import validate_tmdb

    rows = []
    for processes in (1, 2):
        begin, cpu = time.perf_counter(), cpu_seconds()
        output = work / f"validation-{processes}"
        result = validate_tmdb(
            data, processor, max_length=MAX_LENGTH, output_dir=output, processes=processes, progress=False
        )
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
        rows.append(
            {
                "processes": processes,
                "records": result.records,
                "seconds": seconds,
                "records_per_second": result.records / seconds,
                "records_per_cpu_second": result.records / cpu,
            }
        )
    same = [(work / f"validation-{n}" / "accepted.parquet").read_bytes() for n in (1, 2)]
    if same[0] != same[1]:
        raise AssertionError("1 and 2 processes wrote different results")
    return rows


def measure_faulty(data: Path, processor: Any, work: Path) -> dict[str, Any]:
    """Validate records of which 1 % are faulty, with `drop`, and report."""
    from odb_workflow.tmdb.accepted import AcceptedSet
    from odb_workflow.tmdb.pages import data_report_page
    from odb_workflow.tmdb.report import build_report
    from odb_workflow.tmdb.store import RecordStore
    from odb_workflow.tmdb.validate import validate_tmdb

    folder, output = work / "faulty", work / "validation-faulty"
    bad = spoil(data, folder, 0.01)
    begin, cpu = time.perf_counter(), cpu_seconds()
    options = {"max_length": MAX_LENGTH, "on_bad_record": "drop", "processes": 2, "progress": False}
    result = validate_tmdb(folder, processor, output_dir=output, **options)
    validated, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    accepted = AcceptedSet.load(output)
    if sorted(set(range(accepted.n_records)) - set(accepted.rows.tolist())) != bad:
        raise AssertionError("other records were rejected than those made faulty")
    begin = time.perf_counter()
    split = {"mode": "lf_val_size", "val_size": 0.05, "split_seed": 42}
    page = data_report_page(build_report(RecordStore(folder), output, split))
    return {
        "records": result.records,
        "rejected": result.rejected,
        "by_reason": result.info["rejected_by_reason"],
        "validate_seconds": validated,
        "validate_cpu_seconds": cpu,
        "report_seconds": time.perf_counter() - begin,
        "page_bytes": len(page.encode()),
    }


def plain_sample(processor: Any, record: Any, folder: Path) -> Any:
    """Decode, chat template, processor: no labels, no checks."""
    pictures = [Image.open(folder / path).convert("RGB") for path in record.images]
    question, answer = record.turns[0].text.removeprefix("<image>"), record.turns[1].text
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    return processor(text=[text], images=pictures, return_tensors="pt")


def measure_processing(data: Path, processor: Any, count: int) -> dict[str, Any]:
    """CPU seconds of both ways, record by record in turn, so that both see the same machine."""
    import torch
    from odb_workflow.processing.sample import SampleProcessor
    from odb_workflow.tmdb.store import RecordStore

    torch.set_num_threads(1)
    store, samples = RecordStore(data), SampleProcessor(processor, MAX_LENGTH, data)
    half = SampleProcessor(processor, MAX_LENGTH, data, pixel_dtype=torch.bfloat16)
    spent: dict[str, dict[str, float]] = {}
    counted: dict[str, int] = {}
    for row in range(-20, min(count, len(store))):  # the first ones warm up
        record = store[max(row, 0)]
        measured = {}
        for name, make in (
            ("plain", lambda record=record: plain_sample(processor, record, data)),
            ("ours", lambda record=record, row=row: samples(record, row)),
            ("ours_bf16", lambda record=record, row=row: half(record, row)),
        ):
            begin = time.process_time()
            measured[name] = (make(), time.process_time() - begin)
        if row < 0:
            continue
        assert torch.equal(measured["plain"][0]["input_ids"][0], measured["ours"][0]["input_ids"])
        for source in (record.source, "all"):
            counted[source] = counted.get(source, 0) + 1
            sums = spent.setdefault(source, {})
            for name, (_, seconds) in measured.items():
                sums[name] = sums.get(name, 0.0) + seconds
    return {
        source: {
            "samples": counted[source],
            **{f"{name}_per_cpu_second": counted[source] / seconds for name, seconds in sums.items()},
            "ratio": sums["plain"] / sums["ours"],
            "ratio_bf16": sums["plain"] / sums["ours_bf16"],
        }
        for source, sums in sorted(spent.items())
    }


OPEN = """
import sys, time
sys.path.insert(0, sys.argv[1])
import numpy
def peak():  # of this program alone; ru_maxrss begins with the parent's
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
from odb_workflow.tmdb.store import RecordStore
before = peak()
begin = time.perf_counter()
store = RecordStore(sys.argv[2])
opened = time.perf_counter() - begin
begin = time.perf_counter()
rows = numpy.random.default_rng(0).integers(0, len(store), 2000).tolist()
for row in rows:
    store[row]
read = (time.perf_counter() - begin) / len(rows)
print(opened, peak(), before, read, len(store))
"""


def measure_opening(data: Path) -> list[dict[str, float]]:
    """A fresh process opens the dataset: first without index, then with it."""
    (data / ".records.idx").unlink(missing_ok=True)
    rows = []
    for index in ("built", "present"):
        command = [sys.executable, "-c", OPEN, str(HERE.parent / "workflow_scripts"), str(data)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        opened, peak, before, read, records = map(float, printed)
        rows.append(
            {
                "index": index,
                "records": int(records),
                "open_seconds": opened,
                "peak_bytes": peak,
                "before_bytes": before,
                "read_microseconds": 1e6 * read,
            }
        )
    return rows


def measure_memory(data: Path, work: Path) -> dict[str, float]:
    """Peak memory of a process that validates with one process."""
    command = [sys.executable, __file__, "--only-validate", str(data), "--work", str(work)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {"records": int(printed[0]), "peak_bytes": float(printed[1]), "before_bytes": float(printed[2])}


def peak_bytes() -> int:
    """Peak memory of this program alone; ``ru_maxrss`` begins with the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def only_validate(data: Path, work: Path) -> None:
    """Validate and print records, peak memory, and memory before the pass."""
    from odb_workflow.tmdb.validate import validate_tmdb

    processor = make_processor(data)
    before = peak_bytes()
    result = validate_tmdb(
        data, processor, max_length=MAX_LENGTH, output_dir=work / "memory", processes=1, progress=False
    )
    print(result.records, peak_bytes(), before)


def page(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    mib = 1 / 2**20
    lines = [
        "# Data path",
        "",
        f"Command: `python benchmarks/data_path.py --records {result['records']}`. {result['time'][:10]}, "
        f"{result['cpu_count']} CPU cores (shared with other work), load {result['load']:.1f}, "
        f"torch {result['versions']['torch']}, transformers {result['versions']['transformers']}.",
        "",
        "Made-up records: "
        + ", ".join(
            f"{share:.0%} {name} ({sizes[0][0]}x{sizes[0][1]} ...)" for name, share, sizes, _ in SOURCES
        )
        + ". Figures per CPU second do not depend on what else the machine does; those per second do.",
        "",
        "## Validation (every image decoded, every text tokenized, template checked)",
        "",
        "| processes | records | records/s | records per CPU second |",
        "|---|---|---|---|",
        *(
            f"| {row['processes']} | {row['records']:,} | {row['records_per_second']:,.0f} "
            f"| {row['records_per_cpu_second']:,.0f} |"
            for row in result["validation"]
        ),
        "",
        "With 1 % of them made faulty (five kinds) and `on_bad_record: drop`: exactly the {rejected:,} "
        "faulty of {records:,} were rejected in {validate_seconds:.0f} s "
        "({validate_cpu_seconds:.0f} CPU seconds, 2 processes); the data report "
        "took {report_seconds:.1f} s.".format(**result["faulty"]),
        "",
        "## Samples per second of one core",
        "",
        "Plain: `Image.open(...).convert('RGB')`, `apply_chat_template`, `processor(...)`, without labels. "
        "Ours adds labels, checks and EXIF orientation; token ids are equal.",
        "",
        "| records | samples | plain | ours | ratio | ours, bfloat16 pixels | ratio |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {row['samples']:,} | {row['plain_per_cpu_second']:,.0f} "
            f"| {row['ours_per_cpu_second']:,.0f} | {row['ratio']:.2f} "
            f"| {row['ours_bf16_per_cpu_second']:,.0f} | {row['ratio_bf16']:.2f} |"
            for name, row in result["processing"].items()
        ),
        "",
        "## Opening",
        "",
        "| records | offset index | seconds | peak memory | before opening | one record read |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['records']:,} | {row['index']} | {row['open_seconds']:.3f} "
            f"| {row['peak_bytes'] * mib:.0f} MiB | {row['before_bytes'] * mib:.0f} MiB "
            f"| {row['read_microseconds']:.0f} us |"
            for row in result["opening"]
        ),
        "",
        "## Memory of the validation (one process)",
        "",
        "| records | peak memory | of it before the pass (libraries) |",
        "|---|---|---|",
        *(
            f"| {row['records']:,} | {row['peak_bytes'] * mib:.0f} MiB "
            f"| {row['before_bytes'] * mib:.0f} MiB |"
            for row in result["memory"]
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=20_000, help="records to validate")
    parser.add_argument("--samples", type=int, default=400, help="samples to process in both ways")
    parser.add_argument("--open-records", type=int, default=MM_MIX_RECORDS, help="records to open")
    parser.add_argument("--work", type=Path, help="working folder; by default a temporary one")
    parser.add_argument("--only-validate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_validate:
        only_validate(arguments.only_validate, arguments.work)
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        data = make_dataset(work / "data", arguments.records)
        processor = make_processor(data)
        result: dict[str, Any] = {
            "time": now(),
            "git": git_state(HERE),
            "versions": package_versions(),
            "cpu_count": os.cpu_count(),
            "load": os.getloadavg()[0],
            "records": arguments.records,
            "processing": measure_processing(data, processor, arguments.samples),
            "validation": measure_validation(data, processor, work),
            "faulty": measure_faulty(data, processor, work),
            "opening": measure_opening(make_dataset(work / "many", arguments.open_records)),
        }
        quarter = make_dataset(work / "quarter", arguments.records // 4)
        result["memory"] = [measure_memory(folder, work) for folder in (quarter, data)]
    with open(HERE / "data_path.jsonl", "a", encoding="utf-8") as handle:
        handle.write(json.dumps(result) + "\n")
    (HERE / "data_path.md").write_text(page(result), encoding="utf-8")
    print(page(result))


if __name__ == "__main__":
    run_main(main)
