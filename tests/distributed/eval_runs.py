"""Runs of the evaluation programs in forked children of the test process, on any number of gloo ranks.

Forking saves importing torch and transformers for each rank.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from odb_workflow.evaluation import mmmu_run, valloss
from odb_workflow.model.load import load_processor
from odb_workflow.runtime.errors import run_main
from odb_workflow.runtime.files import read_jsonl
from odb_workflow.tmdb.validate import validate_tmdb

VALLOSS_FILES = ("eval_results.json", "all_results.json", "per_sample_losses.jsonl")
MMMU_FILES = (
    "mmmu_mc_likelihood_results.json",
    "predictions.jsonl",
    "excluded.jsonl",
    "score_audit.json",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def child(main: Callable, argv: list[str], rank: int, world_size: int, port: int, log: str, slow: float):
    sys.stdout = sys.stderr = open(f"{log}.{rank}", "a", buffering=1)  # noqa: SIM115
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    if slow:
        for module, name in ((valloss, "loss_scorer"), (mmmu_run, "letter_scorer")):
            setattr(module, name, delayed(getattr(module, name), slow))
    run_main(functools.partial(main, argv))


def delayed(make_scorer: Callable, seconds: float) -> Callable:
    """The same scorer, each batch taking at least this long, so that a kill meets it in the middle."""

    def make(*args):
        score = make_scorer(*args)
        return lambda batch: (time.sleep(seconds), score(batch))[1]

    return make


def start(main: Callable, argv: list[str], world_size: int, log: Path, slow: float = 0.0) -> list:
    context, port = multiprocessing.get_context("fork"), free_port()
    processes = [
        context.Process(target=child, args=(main, argv, rank, world_size, port, str(log), slow))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def run(main: Callable, argv: list[str], log: Path, world_size: int = 1, status: int = 0) -> str:
    """Run to the end; returns what rank 0 printed."""
    processes = start(main, argv, world_size, log)
    for process in processes:
        process.join(120)
    text = Path(f"{log}.0").read_text()
    assert [process.exitcode for process in processes] == [status] * world_size, text
    return text


def contents(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The bytes of the named files."""
    return {name: (folder / name).read_bytes() for name in names}


def make_validation(model_dir: Path, data: Path, folder: Path) -> Path:
    """Validate the TMDB as the workflow does."""
    processor = load_processor(model_dir, 589824)
    validate_tmdb(data, processor, max_length=16384, output_dir=folder, processes=1, progress=False)
    return folder


def make_benchmark(repository: Path, folder: Path) -> Path:
    """The image-reference rows four times over, so that batches have something to hold."""
    case = repository / "tests/cases/12-mmmu-image-refs"
    shutil.copytree(case / "images", folder / "images")
    lines = []
    for copy in range(4):
        for row in read_jsonl(case / "rows.jsonl"):
            row["id"] = row["id"].replace("-1", f"-{copy}")
            row["question"] = row["question"] + " Look closely." * (copy * 3)
            lines.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "rows.jsonl"
