#!/usr/bin/env python3
"""Measure trainings and evaluations on several GPUs of one machine, through the launcher that the rules use.

Qwen3-VL-2B's architecture with random weights; data in the manner of MM-Mix; vision frozen, the language
model trained, bf16. On all GPUs by ZeRO-2 (config/ds_z2.json): fixed batches, ODB padded and packed; ODB by
DDP; on one GPU what the scaling efficiency needs; the same global batches in several layouts; both
evaluations on all ranks and on one.

Each measurement is appended to --output as one JSON line when it is made; a table is printed last. Nothing
starts that --deadline leaves no time for. --calls 3 --call K runs the K-th third.

    python benchmarks/multi_gpu_record.py --calls 3 --call 1 --output call1.jsonl
    python benchmarks/multi_gpu_record.py --summarize call1.jsonl call2.jsonl call3.jsonl --record record.json
    python benchmarks/multi_gpu_record.py --tiny --device cpu --ranks 2 --output tiny.jsonl   # tries it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workflow_scripts"))

import torch
from gpu_bench import several_report
from gpu_bench.architecture import architecture, made_up_words
from gpu_bench.end_to_end import prepare
from gpu_bench.multiple_choice import write_multiple_choice
from gpu_bench.recorder import Recorder
from gpu_bench.several import (
    PER_RANK,
    PER_RANK_TINY,
    Variant,
    compare_evaluations,
    evaluate,
    train,
    variants,
)
from odb_workflow.runtime.files import atomic_write_json
from odb_workflow.runtime.provenance import provenance

PREPARED = "prepared.json"
LATE_SECONDS = 90  # how much longer than expected a measurement may take


@dataclass(frozen=True)
class Item:
    """A measurement: its name in the record, about how many seconds it needs, and how it is made."""

    name: str
    needs_seconds: float
    measure: Callable[[Path, float], None]


class Bench:
    """What all measurements share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cuda = args.device == "cuda"
        self.record = Recorder(args.output, args.deadline, shlex.join([sys.executable, *sys.argv]))
        self.threads = max(1, (os.cpu_count() or 1) // args.ranks)  # of each rank, also of one alone
        self.evaluation_items = 24 if args.tiny else 300
        per_rank = PER_RANK_TINY if args.tiny else PER_RANK
        # one more than equal shards need, so that the padding of shards is seen
        training = args.samples or max(per_rank * args.ranks, 0 if args.tiny else 4_000) + 1
        self.samples = training + self.evaluation_items
        self.record.add("start", ranks=args.ranks, cuda=self.cuda, tiny=args.tiny, **provenance())

    def prepare(self, folder: Path) -> None:
        """Model and data, unless ``folder`` holds them from an earlier call."""
        args, mark = self.args, folder / PREPARED
        wanted = {"samples": self.samples, "tiny": args.tiny, "seed": args.seed}
        if mark.exists():
            if json.loads(mark.read_text()) != wanted:
                raise SystemExit(f"{folder} holds other data; give another --folder, or delete it")
            return
        config = architecture(args.tiny)
        device = torch.device(args.device)
        # in a process of its own: this one must hold no memory of the first rank's GPU
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            figures = pool.submit(
                prepare, folder, config, self.samples, device, args.tiny, args.seed
            ).result()
        began = time.perf_counter()
        words, shrink = made_up_words(500, args.seed), 8 if args.tiny else 1
        write_multiple_choice(
            folder / "multiple-choice", self.evaluation_items, words, args.seed, shrink=shrink
        )
        self.record.add("prepared", **figures, benchmark_seconds=time.perf_counter() - began)
        atomic_write_json(mark, wanted)

    def items(self) -> list[Item]:
        """All measurements, in order."""
        trainings = [self._training(variant) for variant in variants(self.args.ranks, self.args.tiny)]
        return [*trainings, *(self._evaluation(what) for what in ("validation loss", "letters"))]

    def _training(self, variant: Variant) -> Item:
        def measure(folder: Path, timeout: float) -> None:
            figures = train(
                folder,
                variant,
                cuda=self.cuda,
                threads=variant.ranks * self.threads,
                validation_items=self.evaluation_items,
                timeout=timeout,
            )
            self.record.add(variant.name, **figures)

        return Item(variant.name, variant.needs_seconds, measure)

    def _evaluation(self, what: str) -> Item:
        def measure(folder: Path, timeout: float) -> None:
            ends = time.monotonic() + timeout
            for ranks in (self.args.ranks, 1):
                left = ends - time.monotonic()
                figures = evaluate(
                    folder,
                    what,
                    ranks,
                    items=self.evaluation_items,
                    cuda=self.cuda,
                    threads=ranks * self.threads,
                    timeout=left,
                )
                self.record.add(f"{what}, {ranks} rank{'s' if ranks > 1 else ''}", **figures)
            agreement = compare_evaluations(folder, what, self.args.ranks)
            self.record.add(f"{what}, agreement", ranks=self.args.ranks, **agreement)

        return Item(what, 100, measure)

    def run(self, folder: Path) -> None:
        """All items of this call that there is time for."""
        args = self.args
        chosen = share(self.items(), args.calls, args.call)
        for item in chosen:
            if args.only and not any(text in item.name for text in args.only):
                continue
            needs = item.needs_seconds
            with self.record.measuring(item.name, needs) as there_is_time:
                if there_is_time:
                    left = self.record.deadline - time.monotonic()
                    item.measure(folder, min(needs + LATE_SECONDS, left + args.grace))


def share(items: list[Item], calls: int, call: int) -> list[Item]:
    """The items of one call of several that take about equally long; neighbors stay together."""
    total, passed, chosen = sum(item.needs_seconds for item in items), 0.0, []
    for item in items:
        middle = passed + item.needs_seconds / 2
        if int(middle * calls / total) + 1 == call:
            chosen.append(item)
        passed += item.needs_seconds
    return chosen


def summarize(paths: list[Path], record: Path | None) -> int:
    """Print the table of several calls, and write their record."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    found = several_report.conclude(lines)
    print(several_report.table(found), flush=True)
    if record is not None:
        atomic_write_json(record, several_report.record(lines, found))
    return 1 if False in found["checks"].values() else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("multi_gpu_record.jsonl"), help="JSON lines; appended to")
    add("--ranks", type=int, default=0, help="GPUs to use, or ranks on a CPU; 0: all GPUs")
    add("--calls", type=int, default=1, help="calls that the measurements are spread over")
    add("--call", type=int, default=1, help="which of them this one is, from 1")
    add("--only", nargs="+", default=[], help="only measurements whose name holds one of these texts")
    add("--deadline", type=float, default=510, help="seconds after which nothing more is started")
    add("--grace", type=float, default=30, help="seconds that a started one may run beyond --deadline")
    add("--folder", type=Path, default=None, help="keep model and data here for the next call")
    add("--samples", type=int, default=0, help=f"training samples; 0: {PER_RANK} a rank, at least 4,000")
    add("--device", default="cuda", help="cuda or cpu")
    add("--tiny", action="store_true", help="a tiny model and few samples, to try the script")
    add("--list", action="store_true", help="print the measurements of this call and end")
    add("--summarize", type=Path, nargs="+", default=None, help="table of these files; nothing is run")
    add("--record", type=Path, default=None, help="with --summarize: write the record for results/examples")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.summarize:
        return args
    args.ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if not 1 <= args.call <= args.calls:
        parser.error(f"--call {args.call} is not one of the {args.calls} calls")
    if args.list:
        args.output = Path(os.devnull)
        return args
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        parser.error(
            f"{args.ranks} ranks, torch sees {torch.cuda.device_count()} GPUs; --tiny --device cpu tries it"
        )
    if args.ranks < 2:
        parser.error("several ranks are compared with one: at least 2 GPUs are needed")
    return args


def main() -> int:
    """Run what was asked for; 1 where a measurement failed or a check did not hold."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    args = parse_arguments()
    if args.summarize:
        return summarize(args.summarize, args.record)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what it has launched
    bench = Bench(args)
    if args.list:
        for item in share(bench.items(), args.calls, args.call):
            print(f"{item.needs_seconds:>5.0f} s  {item.name}")
        return 0
    try:
        with contextlib.ExitStack() as stack:
            folder = args.folder or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="multi-gpu-"))
            )
            folder.mkdir(parents=True, exist_ok=True)
            bench.prepare(folder)
            bench.run(folder)
    finally:
        found: dict[str, Any] = several_report.conclude(bench.record.lines)
        print(several_report.table(found), flush=True)
    return 1 if bench.record.faults or False in found["checks"].values() else 0


if __name__ == "__main__":
    sys.exit(main())
