"""Random loader runs without a model: is any sample lost, doubled, or does any run hang?

Each run draws lengths, token budget, buffer, workers, prefetch, ranks (1-3, real gloo), epochs and a loader
kind, and checks what all ranks received. Usage:

    python benchmarks/loader_fuzz.py --runs 200 --seed 0 --output benchmarks/loader_fuzz.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workflow_scripts"))

from odb_workflow.loaders.epoch_plan import epoch_positions
from odb_workflow.loaders.factory import (
    LOADER_KINDS,
    LoaderSettings,
    build_epoch_loader,
    planned_duplicates,
)
from odb_workflow.runtime.files import atomic_write_json
from odb_workflow.runtime.provenance import package_versions
from odb_workflow.training.agreement import RankCounts, Ranks

SECONDS_PER_RUN = 90
# small buffers and many workers are meant here
warnings.filterwarnings("ignore")


class Lengths:
    """Samples that hold nothing but their length; some take longer to make."""

    def __init__(self, lengths: np.ndarray, slow: float) -> None:
        self.lengths, self.slow = lengths, slow

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if self.slow and position % 7 == 0:
            time.sleep(self.slow)
        return {
            "row": position,
            "input_ids": torch.zeros(int(self.lengths[position]), dtype=torch.int64),
            "odb_n_patches": int(self.lengths[position]) // 2,
        }


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows and lengths; odb's keys are passed on."""
    batch: dict[str, Any] = {
        "rows": torch.tensor([sample["row"] for sample in samples]),
        "input_ids": torch.zeros(len(samples), 1),
    }
    return batch | {
        key: samples[0][key] for key in ("total_batch_size", "odb_total_tokens") if key in samples[0]
    }


def draw_run(draw: np.random.Generator) -> dict[str, Any]:
    """The settings of one run."""
    count = int(draw.choice([1, 2, 3, 5, 17, 64, 200, 501]))
    shape = draw.choice(["uniform", "bimodal", "equal", "tail"])
    lengths = {
        "uniform": draw.integers(1, 400, count),
        "bimodal": np.where(
            draw.random(count) < 0.8, draw.integers(5, 40, count), draw.integers(300, 900, count)
        ),
        "equal": np.full(count, int(draw.integers(1, 200))),
        "tail": np.minimum(draw.pareto(1.2, count) * 20 + 1, 3000).astype(int),
    }[str(shape)]
    kind = str(draw.choice(LOADER_KINDS, p=[0.7, 0.1, 0.1, 0.1]))
    settings = LoaderSettings(
        kind=kind,
        token_budget=int(draw.choice([50, 300, 1000, 5000])),
        buffer_size=int(draw.choice([2, 7, 32, 128, 1024])),
        odb_loss_scaling=str(draw.choice(["none", "approx", "exact"])),
        join=True,
        no_warmup=bool(draw.random() < 0.5),
        group_order_flip=str(draw.choice(["none", "rank_window_random", "rank_window_balanced"])),
        max_patches=int(draw.choice([0, 0, 200])),
        fixed_batch_size=int(draw.choice([1, 4, 9])),
        num_workers=int(draw.integers(1, 4)),
        prefetch_factor=int(draw.choice([1, 2, 16, 64])),
        seed=int(draw.integers(0, 1000)),
    )
    return {
        "settings": settings,
        "lengths": lengths,
        "world_size": int(draw.integers(1, 4)),
        "epochs": int(draw.integers(1, 4)),
        "slow": float(draw.choice([0.0, 0.0, 0.002])),
        "stop_early": bool(draw.random() < 0.15),
        "shape": str(shape),
    }


def rank_main(run: dict[str, Any], rank: int, port: int, results: Any) -> None:
    """One rank of one run: iterate all epochs in step with the others, and report the rows of each."""
    world = run["world_size"]
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    ranks = Ranks(rank, world)
    lengths, settings = run["lengths"], run["settings"]
    epochs = []
    for epoch in range(run["epochs"]):
        positions = epoch_positions(len(lengths), settings.seed, epoch)
        loader = build_epoch_loader(
            settings,
            Lengths(lengths, run["slow"]),
            collate,
            positions,
            lengths,
            epoch=epoch,
            segment=0,
            rank=rank,
            world_size=world,
        )
        rows: list[int] = []
        iterator = iter(loader)
        steps = 0
        while True:
            batch = next(iterator, None)
            info = None if batch is None else batch.get("odb_info")
            size = 0 if batch is None else len(batch["rows"])
            counts = ranks.agree(RankCounts(batches=int(batch is not None), samples=size))
            if batch is None:
                break
            if info is not None and info.all_samples_this_step != counts.samples:
                raise AssertionError(f"odb counted {info.all_samples_this_step}, there are {counts.samples}")
            rows += batch["rows"].tolist()
            steps += 1
            if run["stop_early"] and steps == 2:
                break
        loader.close()
        epochs.append(rows)
        if run["stop_early"]:
            break
    left = len(multiprocessing.active_children())
    results.put((rank, epochs, left))
    if world > 1:
        torch.distributed.destroy_process_group()


def check(run: dict[str, Any], by_rank: dict[int, list[list[int]]]) -> dict[str, int]:
    """Samples lost and doubled over the epochs of a run."""
    lost = doubled = 0
    for epoch in range(len(by_rank[0])):
        positions = epoch_positions(len(run["lengths"]), run["settings"].seed, epoch)
        emitted = Counter(row for rank in by_rank for row in by_rank[rank][epoch])
        wanted = Counter(positions.tolist())
        allowed = wanted + Counter(planned_duplicates(run["settings"], positions, run["world_size"]))
        doubled += (emitted - allowed).total()
        lost += 0 if run["stop_early"] else (wanted - emitted).total()
    return {"lost": lost, "doubled": doubled}


def execute(run: dict[str, Any]) -> dict[str, Any]:
    """One run in processes of its own."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.SimpleQueue()
    processes = [
        context.Process(target=rank_main, args=(run, rank, port, results))
        for rank in range(run["world_size"])
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    received: dict[int, list[list[int]]] = {}
    left = 0
    while len(received) < len(processes) and time.monotonic() - began < SECONDS_PER_RUN:
        if results.empty():
            if any(process.exitcode not in (None, 0) for process in processes):
                break
            time.sleep(0.01)
            continue
        rank, epochs, orphans = results.get()
        received[rank] = epochs
        left += orphans
    for process in processes:
        process.join(10)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
        process.join()
    outcome: dict[str, Any] = {"seconds": time.monotonic() - began, "hung": bool(hung), "left": left}
    outcome["failed"] = len(received) < len(processes) and not hung
    if len(received) == len(processes):
        outcome |= check(run, received)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="repeat this one run")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    totals = Counter(dict.fromkeys(("runs", "lost", "doubled", "hung", "failed", "left"), 0))
    bad, began = [], time.monotonic()
    per_kind: Counter[str] = Counter()
    for number in range(options.runs) if options.only is None else [options.only]:
        run = draw_run(np.random.default_rng([options.seed, number]))
        outcome = execute(run)
        totals["runs"] += 1
        per_kind[f"{run['settings'].kind}, {run['world_size']} ranks"] += 1
        for key in ("lost", "doubled", "hung", "failed", "left"):
            totals[key] += int(outcome.get(key, 0))
        if any(outcome.get(key, 0) for key in ("lost", "doubled", "hung", "failed", "left")):
            plain = {key: value for key, value in run.items() if key not in ("settings", "lengths")}
            bad.append(
                {"run": number, **plain, **asdict(run["settings"]), "n": len(run["lengths"]), **outcome}
            )
            print(json.dumps(bad[-1]), flush=True)
        if number % 20 == 19:
            print(f"{number + 1} runs, {dict(totals)}, {time.monotonic() - began:.0f} s", flush=True)
    result = {
        "command": f"python benchmarks/loader_fuzz.py --runs {options.runs} --seed {options.seed}",
        "totals": dict(totals),
        "runs_per_kind": dict(sorted(per_kind.items())),
        "bad_runs": bad,
        "seconds": time.monotonic() - began,
        "versions": {
            name: package_versions()[name] for name in ("python", "torch", "online-dynamic-batching")
        },
    }
    print(json.dumps(result["totals"]))
    if options.output:
        atomic_write_json(options.output, result)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
