#!/usr/bin/env python3
"""Run the whole workflow with the real preset on this machine's GPU, and measure where its time goes.

Qwen3-VL-2B's architecture with random weights, data and multiple-choice questions in the manner of MM-Mix
and MMMU; everything else is config/qwen3vl-2b.yaml, through ``./run.sh all`` as a user would run it (ZeRO-2
included). Afterwards a dry run must list no job. Prints the seconds of every job, appends one JSON line to
--output, and copies report and logs beside it. Stopped by --limit, it records what had ended. A model
of random weights says nothing about quality.

    python benchmarks/workflow_on_gpu.py --output workflow_on_gpu.jsonl
    python benchmarks/workflow_on_gpu.py --tiny --device cpu --output tiny.jsonl     # tries it
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workflow_scripts"))

import torch
import yaml
from gpu_bench.architecture import architecture, made_up_words
from gpu_bench.end_to_end import prepare
from gpu_bench.multiple_choice import write_multiple_choice
from gpu_bench.recorder import Recorder
from odb_workflow.runtime.files import read_json

CHECKOUT = Path(__file__).resolve().parent.parent
RUN = "workflow-on-gpu"
REPORT = ("comparison.json", "comparison.md", "comparison.html")


def write_settings(folder: Path, args: argparse.Namespace) -> Path:
    """The settings that lie over the real preset; returns their file."""
    settings: dict[str, Any] = {
        "run": RUN,
        "builder": {"kind": "existing"},
        "data": {"dir": str(folder / "tmdb")},
        "model": {"path": str(folder / "model")},
        "split": {"train_size": args.train_size},
        "evaluation": {"mmmu": {"dataset": str(folder / "multiple-choice")}},
    }
    if args.arms:
        settings["arms"] = yaml.safe_load(args.arms)
    if args.device == "cpu":
        settings["device"] = "cpu"
        settings["training"] = {"precision": "fp32", "deepspeed_config": None, "num_workers": 1}
        settings["resources"] = {
            stage: {"threads": 2, "mem_mb": 4000} for stage in ("data", "train", "evaluate")
        }
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def workflow(settings: Path, directory: Path, limit: float, *arguments: str) -> tuple[int, str, float]:
    """``./run.sh all`` with this program's interpreter, stopped after ``limit`` seconds as a scheduler would.

    Returns:
        Exit status, output, seconds.
    """
    command = [
        *(str(CHECKOUT / "run.sh"), "all", "--directory", str(directory), *arguments),
        *("--configfile", str(CHECKOUT / "config" / "qwen3vl-2b.yaml"), str(settings)),
    ]
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(limit, process.terminate)
        timer.start()
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        timer.cancel()
    return process.returncode, "".join(lines), time.perf_counter() - began


def seconds_of_jobs(directory: Path) -> dict[str, float]:
    """Wall-clock seconds of each job, by the files that Snakemake's ``benchmark:`` wrote."""
    logs = directory / "logs" / RUN
    found = {}
    for path in sorted(logs.rglob("*.benchmark.tsv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        found[str(path.relative_to(logs)).removesuffix(".benchmark.tsv")] = float(rows[-1]["s"])
    return found


def summaries(directory: Path) -> dict[str, dict[str, Any]]:
    """What is worth a look of each arm's training."""
    wanted = (
        *("emitted_samples", "global_step", "effective_emitted_samples_per_second", "real_tokens_per_second"),
        *("padding_ratio", "startup_seconds", "runtime_seconds", "compile_seconds", "data_wait_seconds"),
        *("peak_memory_bytes_gpu", "performance_switches", "world_size"),
    )
    found = {}
    for path in sorted((directory / "outputs" / RUN).glob("*/train_summary_*.json")):
        summary = read_json(path)
        audit = summary["samples_audit"]
        found[path.parent.name] = {key: summary.get(key) for key in wanted} | {
            "ids_complete": audit["complete"],
            "lost": audit["lost"],
            "doubled": audit["doubled"],
        }
    return found


def main() -> int:
    """Prepare, run, run again dry, and record."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("workflow_on_gpu.jsonl"), help="JSON lines; appended to")
    add("--train-size", type=int, default=512, help="training samples of each arm")
    add("--arms", default="", help="further arms as YAML: {odb_49k: {loader: odb, token_budget: 49152}}")
    add("--items", type=int, default=300, help="validation samples and multiple-choice questions")
    add("--limit", type=float, default=3600, help="seconds after which the workflow is stopped")
    add("--device", default="cuda", help="cuda or cpu")
    add("--tiny", action="store_true", help="a tiny model and few samples, to try the script")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.tiny:
        args.train_size, args.items = 48, 24
    record = Recorder(args.output, float("inf"), shlex.join([sys.executable, *sys.argv]))
    with tempfile.TemporaryDirectory(prefix="workflow-on-gpu-") as name:
        folder, directory = Path(name), Path(name) / "work"
        directory.mkdir()
        # val_size of the preset is 0.05, at least `items` of them: train_size takes the head of the others
        samples = max(args.train_size + args.items, args.items * 20 if not args.tiny else 0)
        prepare(folder, architecture(args.tiny), samples, torch.device(args.device), args.tiny, args.seed)
        words, shrink = made_up_words(500, args.seed), 8 if args.tiny else 1
        write_multiple_choice(folder / "multiple-choice", args.items, words, args.seed, shrink=shrink)
        settings = write_settings(folder, args)
        status, _, seconds = workflow(settings, directory, args.limit)
        shutil.copytree(directory / "logs", args.output.parent / "logs", dirs_exist_ok=True)
        nothing_left = False
        if status == 0:
            _, listed, _ = workflow(settings, directory, 120, "-n")
            nothing_left = "Nothing to be done" in listed
            for file in REPORT:
                shutil.copy(directory / "results" / RUN / file, args.output.parent / file)
        jobs = seconds_of_jobs(directory)
        record.add(
            "workflow",
            status=status,
            seconds=seconds,
            seconds_outside_jobs=seconds - sum(jobs.values()) if status == 0 else None,
            nothing_left_to_do=nothing_left,
            jobs=jobs,
            arms=summaries(directory),
        )
        for job, took in sorted(jobs.items(), key=lambda pair: -pair[1]):
            print(f"{took:8.1f} s  {job}")
        print(f"{seconds:8.1f} s  in all")
    return 0 if record.lines[-1]["nothing_left_to_do"] else 1


if __name__ == "__main__":
    sys.exit(main())
