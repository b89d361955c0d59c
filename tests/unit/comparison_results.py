"""Made-up results of finished runs for the tests of the comparison: real file names, invented numbers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SOURCES = ("vqa_like", "sharegpt4o", "iiit5k")
CATEGORIES = ("Art & Design", "Business", "Science")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON document per line; NaN is written as null, as the programs do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text.replace("NaN", "null"), encoding="utf-8")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented JSON; NaN is written as null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2).replace("NaN", "null"), encoding="utf-8")


def sample_lengths(n: int = 2000, seed: int = 0) -> np.ndarray:
    """Bimodal lengths: many short records, a tail of long ones."""
    rng = np.random.default_rng(seed)
    short = rng.integers(25, 70, n)
    long = np.exp(rng.normal(5.6, 0.5, n)).astype(int)
    return np.where(rng.random(n) < 0.75, short, long)


def write_training(
    folder: Path, arm: str, *, loader: str, batch: int | None, speed: float, seed: int = 42, **changes: Any
) -> None:
    """Summary and step log of an arm; ``speed`` in computed tokens/s, ``batch`` None for a token budget."""
    lengths = sample_lengths()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    if batch is None:
        order = order[np.argsort(lengths[order] // 40, kind="stable")]
    steps, position, elapsed, real_total, padded_total = [], 0, 1.5, 0, 0
    while position < len(order):
        size = batch or max(1, 1600 // int(lengths[order[position : position + 30]].max()))
        group = lengths[order[position : position + size]]
        position += len(group)
        real, padded = int(group.sum()), int(group.max() * len(group) - group.sum())
        seconds = (real + padded) / speed * rng.uniform(0.9, 1.1) + 0.004
        elapsed += seconds
        real_total, padded_total = real_total + real, padded_total + padded
        progress = position / len(order)
        steps.append(
            {
                "step": len(steps) + 1,
                "epoch": progress,
                "samples": len(group),
                "samples_total": position,
                "real_tokens": real,
                "padded_tokens": padded,
                "label_tokens": real // 2,
                "loss": 4.2 * np.exp(-2.0 * progress) + 1.0 + rng.normal(0, 0.15),
                "lr": 1e-3,
                "grad_norm": 1.0,
                "step_ms": seconds * 1000,
                "data_wait_ms": seconds * 50,
                "peak_memory_bytes": 2**30,
                "elapsed_seconds": elapsed,
            }
        )
    rng.shuffle(steps) if batch is None else None
    if batch is None:  # after the shuffle the running totals are rebuilt
        total, clock = 0, 1.5
        for number, step in enumerate(steps, start=1):
            total, clock = total + step["samples"], clock + step["step_ms"] / 1000
            progress = total / len(order)
            loss = 4.2 * np.exp(-2.0 * progress) + 1.0 + rng.normal(0, 0.1)
            step.update(step=number, samples_total=total, elapsed_seconds=clock, loss=loss, epoch=progress)
    runtime = steps[-1]["elapsed_seconds"] + 0.3
    summary = {
        "arm": arm,
        "loader": loader,
        "global_step": len(steps),
        "optimizer_steps": len(steps),
        "emitted_samples": len(order),
        "mean_emitted_samples_per_step": len(order) / len(steps),
        "effective_emitted_samples_per_second": len(order) / runtime,
        "real_tokens_per_second": real_total / runtime,
        "runtime_seconds": runtime,
        "train_loss": float(np.mean([step["loss"] for step in steps])),
        "world_size": 1,
        "split": {
            "mode": "lf_val_size",
            "val_size": 0.05,
            "split_seed": 42,
            "train": 2000,
            "validation": 300,
        },
        "token_budget": None if batch else 1600,
        "buffer_size": None if batch else 256,
        "fixed_batch_size": batch,
        "loss_scaling": "label_tokens",
        "join": True,
        "padding": "pad",
        "real_tokens": real_total,
        "padded_tokens": padded_total,
        "padding_ratio": padded_total / (real_total + padded_total),
        "label_tokens": real_total // 2,
        "data_wait_seconds": sum(step["data_wait_ms"] for step in steps) / 1000,
        "startup_seconds": 1.5,
        "peak_memory_bytes": 3 * 2**30 // 2,
        "peak_memory_bytes_gpu": None,
        "ending": "finished",
        "epochs": 1.0,
        "schedule_basis": "samples",
        "lr": 1e-3,
        "seed": 42,
        "device": "cpu",
        "precision": "fp32",
        "performance_switches": {"attention": "sdpa", "label_head": True, "compile": False},
        "versions": {"torch": "2.14.1", "transformers": "5.24.0"},
        "git_commit": "0123456789abcdef",
        "code_version": 1,
        "samples_audit": {
            "expected": 2000,
            "distinct": 2000,
            "padding_duplicates": 0,
            "missing": 0,
            "lost": 0,
            "doubled": 0,
            "ids_sha256": hashlib.sha256(arm.encode()).hexdigest(),  # in the order of training
            "complete": True,
            "epochs": [{"epoch": 0, "set_sha256": "a" * 64}],
        },
    }
    for key, value in changes.items():
        summary[key] = value
    write_json(folder / f"train_summary_{arm}.json", summary)
    write_jsonl(folder / "step_log.jsonl", steps)
    write_json(folder / "run_record.json", {"config": {"lr": 1e-3}})


def write_evaluations(
    folder: Path, *, loss: float, accuracy: float, seed: int, n: int = 300, m: int = 240
) -> None:
    """Validation loss and MMMU-MC around the given levels; the same records for every arm."""
    rng = np.random.default_rng(seed)
    base = np.random.default_rng(7).gamma(6.0, 1 / 6.0, n)
    tokens = np.random.default_rng(8).integers(3, 80, n)
    losses = base * loss + rng.normal(0, 0.08, n)
    rows = [
        {
            "id": f"val-{i}",
            "row": 2000 + i,
            "source": SOURCES[i % len(SOURCES)],
            "loss": float(losses[i]),
            "label_tokens": int(tokens[i]),
        }
        for i in range(n)
    ]
    out = folder / "eval_out_accelerate_valloss"
    results = {
        "eval_loss": float(losses.mean()),
        "token_weighted_eval_loss": float((losses * tokens).sum() / tokens.sum()),
        "eval_samples": n,
        "label_tokens": int(tokens.sum()),
        "label_tokens_per_sample": {"p50": float(np.median(tokens)), "mean": float(tokens.mean())},
        "code_version": 1,
    }
    write_json(out / "eval_results.json", results)
    write_jsonl(out / "per_sample_losses.jsonl", rows)
    difficulty = np.random.default_rng(9).random(m)
    correct = difficulty + rng.normal(0, 0.08, m) < accuracy
    predictions = [
        {
            "id": f"q-{i}",
            "subject": f"Subject_{i % 6}",
            "category": CATEGORIES[i % 3],
            "ground_truth": "A",
            "prediction": "A" if correct[i] else "B",
            "correct": bool(correct[i]),
            "valid_candidate_letters": ["A", "B", "C", "D"],
        }
        for i in range(m)
    ]
    out = folder / "mmmu_mc_likelihood_accelerate"
    share = float(correct.mean())
    results = {
        "protocol": "MMMU-MC-choice-likelihood-v1",
        "accuracy": share,
        "num_scored": m,
        "standard_error": float(np.sqrt(share * (1 - share) / m)),
        "code_version": 1,
    }
    write_json(out / "mmmu_mc_likelihood_results.json", results)
    write_jsonl(out / "predictions.jsonl", predictions)
    write_jsonl(out / "excluded.jsonl", [{"id": "x", "reason": "answer is no single letter A-H"}])


def write_run(root: Path) -> Path:
    """A run with arms odb, standard, standard_1, untrained, all complete; returns the folder of the arms."""
    write_training(root / "odb", "odb", loader="odb", batch=None, speed=9000)
    write_evaluations(root / "odb", loss=1.30, accuracy=0.47, seed=1)
    write_training(root / "standard", "standard", loader="standard", batch=8, speed=7500)
    write_evaluations(root / "standard", loss=1.33, accuracy=0.45, seed=2)
    write_training(root / "standard_1", "standard_1", loader="standard", batch=1, speed=3500)
    write_evaluations(root / "standard_1", loss=1.22, accuracy=0.49, seed=3)
    write_evaluations(root / "untrained", loss=5.0, accuracy=0.26, seed=4)
    checked = {"records": 2303, "accepted": 2300, "rejected": 3, "rejected_by_reason": {"over_length": 3}}
    checked["by_source"] = {
        "vqa_like": {"rejected": 3, "reasons": {"over_length": 3}},
        "iiit5k": {"rejected": 0},
    }
    write_json(root / "tmdb_validation" / "validation.json", checked)
    lengths = sample_lengths()
    (root / "tmdb_validation").mkdir(parents=True, exist_ok=True)
    table = {"row": np.arange(len(lengths)), "length": lengths.astype("int32"), "source": "vqa_like"}
    pd.DataFrame(table).to_parquet(root / "tmdb_validation" / "accepted.parquet")
    return root
