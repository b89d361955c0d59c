"""Trainings and evaluations on several ranks: what is run, and the figures taken from what they write."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .end_to_end import fixed_flags, odb_flags, settled
from .launched import SCRIPTS, Ended, launch

CONFIG = SCRIPTS.parent / "config" / "ds_z2.json"
BUFFER = 1024
WORKERS = 12
PER_RANK = 2_000  # training samples of each rank
PER_RANK_TINY = 40
LAYOUT_STEPS = 3
LAYOUT_SAMPLES = 4  # per rank and step


@dataclass(frozen=True)
class Variant:
    """One training.

    Attributes:
        batches: How batches are formed; variants with equal batches are compared over ranks.
        engine: ``ZeRO-2``, ``DDP`` or ``plain`` (one process).
        settle_steps: First steps that are left out of the speed.
        needs_seconds: About how long it takes, start included.
        layout: Steps on the same global batches as the other layouts; not a measurement of speed.
    """

    batches: str
    ranks: int
    engine: str
    flags: tuple[str, ...]
    settle_steps: int
    logging_steps: int
    needs_seconds: float
    layout: bool = False

    @property
    def name(self) -> str:
        """The name in the record."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        engine = "" if self.engine == "plain" else f", {self.engine}"
        return f"{'layout: ' if self.layout else ''}{ranks}{engine}, {self.batches}"


def variants(ranks: int, tiny: bool) -> list[Variant]:
    """The trainings; those that a scaling efficiency needs come first."""
    small, large, some = ("512", "1024", 8) if tiny else ("12288", "49152", 400)
    workers = 1 if tiny else WORKERS
    prefetch = 64 if tiny else -(-2 * BUFFER // workers)  # two buffers ahead
    ours = () if tiny else ("--performance", '{"compile_layers": true}')
    roomy = () if tiny else ("--performance", '{"compile_layers": true, "checkpointing": "off"}')
    one_rank = ("--train-size", str(PER_RANK_TINY if tiny else PER_RANK))
    limited = ("--max-steps", str(some))

    def shown(budget: str) -> str:
        return f"ODB {int(budget):,}"

    def odb(budget: str, padding: str) -> tuple[str, ...]:
        return odb_flags(budget, padding, prefetch) + (roomy if budget == small else ours)

    def steps(settle: int, logging: int) -> tuple[int, int]:
        return (2, 1) if tiny else (settle, logging)

    few, middle, many = steps(8, 2), steps(24, 8), steps(80, 40)
    packed = odb(large, "pack")
    return [
        Variant(f"{shown(large)} packed", ranks, "ZeRO-2", packed, *few, 130),
        Variant(f"{shown(large)} packed", 1, "plain", packed + one_rank, *few, 110),
        Variant(f"{shown(large)} packed", ranks, "DDP", packed, *few, 110),
        *layouts(ranks, tiny),
        Variant(f"{shown(small)} padded", ranks, "ZeRO-2", odb(small, "pad"), *middle, 110),
        Variant(f"{shown(large)} padded", ranks, "ZeRO-2", odb(large, "pad"), *few, 110),
        Variant("fixed 8 packed", ranks, "ZeRO-2", (*fixed_flags("8", "pack"), *roomy), *middle, 120),
        Variant("fixed 32 packed", ranks, "ZeRO-2", (*fixed_flags("32", "pack"), *ours), *few, 110),
        Variant("fixed 1", ranks, "ZeRO-2", (*fixed_flags("1"), *roomy, *limited), *many, 120),
        Variant("fixed 1", 1, "plain", (*fixed_flags("1"), *roomy, *limited), *many, 110),
    ]


def layouts(ranks: int, tiny: bool) -> list[Variant]:
    """The same global batches on one rank and on several, padded and packed, by DDP and ZeRO-2."""
    rest = ("--max-steps", str(LAYOUT_STEPS), "--lr", "1e-5", "--lr-scheduler", "constant")
    rest = (*rest, "--warmup-ratio", "0", *(() if tiny else ("--performance", '{"compile_layers": false}')))

    def layout(world: int, engine: str, padding: str, word: str) -> Variant:
        flags = (*fixed_flags(str(LAYOUT_SAMPLES * ranks // world), padding), *rest)
        return Variant(word, world, engine, flags, 0, 1, 40, layout=True)

    return [
        layout(1, "plain", "pad", "padded"),
        layout(ranks, "DDP", "pack", "packed"),
        layout(ranks, "ZeRO-2", "pad", "padded"),
        layout(ranks, "ZeRO-2", "pack", "packed"),
    ]


def train(
    folder: Path, variant: Variant, *, cuda: bool, threads: int, validation_items: int, timeout: float
) -> dict[str, Any]:
    """One training through the launcher; its figures."""
    number = len(list(folder.glob("run-*")))
    output = folder / f"run-{number}"
    output.mkdir()
    notes = output / "notes"
    ended = launch(
        Path(__file__).with_name("watched_training.py"),
        [
            str(notes),
            *("--arm", "bench", "--data", str(folder / "tmdb"), "--validation", str(folder / "validation")),
            *("--model", str(folder / "model"), "--output-dir", str(output / "arm")),
            *("--val-size", str(validation_items), "--lr", "1e-7", "--save-final-model", "0"),
            *("--checkpoint-every-minutes", "0", "--logging-steps", str(variant.logging_steps)),
            *("--buffer-size", str(BUFFER), "--num-workers", str(WORKERS)),
            *variant.flags,
            *(("--deepspeed-config", str(CONFIG)) if variant.engine == "ZeRO-2" else ()),
            *(() if cuda else ("--precision", "fp32", "--buffer-size", "32", "--num-workers", "1")),
        ],
        processes=variant.ranks,
        cuda=cuda,
        threads=threads,
        log=output / "log.txt",
        timeout=timeout,
        accelerate=True,
    )
    summary = json.loads((output / "arm" / "train_summary_bench.json").read_text())
    lines = _json_lines(output / "arm" / "step_log.jsonl")
    return {"ranks": variant.ranks, "engine": variant.engine, "batches": variant.batches} | (
        layout_figures(lines) | {"orphans": ended.orphans}
        if variant.layout
        else speed_figures(variant, lines, summary, ended) | noted_figures(notes)
    )


def speed_figures(
    variant: Variant, lines: list[dict[str, Any]], summary: dict[str, Any], ended: Ended
) -> dict[str, Any]:
    """Speed, balance over ranks and the account of samples, from step log and summary."""
    audit = summary["samples_audit"]
    return {
        **settled(lines, variant.settle_steps, variant.logging_steps),
        **balance(lines),
        "all_steps": summary["global_step"],
        "samples_per_step": summary["mean_emitted_samples_per_step"],
        "loss": summary["train_loss"],
        "ids_expected": audit["expected"],
        "ids_covered": audit["distinct"],
        "padding_duplicates": audit["padding_duplicates"],
        "ids_lost_or_doubled": audit["lost"] + audit["doubled"],
        "whole_pass": summary["ending"] == "finished",
        "audit_complete": audit["complete"],
        "whole_run_samples_per_second": summary["effective_emitted_samples_per_second"],
        "whole_run_tokens_per_second": summary["real_tokens_per_second"],
        "startup_seconds": summary["startup_seconds"],
        "launched_seconds": ended.seconds,
        "orphans": ended.orphans,
        "checkpointing": summary["performance_switches"].get("checkpointing"),
        "switches": summary["performance_switches"],
        "commit": summary["git_commit"],
    }


def balance(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps and tokens of each rank.

    ``token_imbalance`` is the busiest rank's tokens of the run over the mean; ``step_imbalance`` the same
    step by step, weighted by tokens: what the ranks lose by waiting for each other, if time goes by tokens.
    ``uneven_steps`` counts steps in which a rank had no sample.
    """
    samples = np.array([line["samples_per_rank"] for line in lines])  # [steps, ranks]
    tokens = np.array([line["real_tokens_per_rank"] for line in lines])
    return {
        "steps_per_rank": (samples > 0).sum(axis=0).tolist(),
        "samples_per_rank": samples.sum(axis=0).tolist(),
        "tokens_per_rank": tokens.sum(axis=0).tolist(),
        "token_imbalance": float(tokens.sum(axis=0).max() / tokens.sum(axis=0).mean()),
        "step_imbalance": float(tokens.max(axis=1).sum() / tokens.mean(axis=1).sum()),
        "uneven_steps": int((samples == 0).any(axis=1).sum()),
    }


def layout_figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss and gradient norm of each step, and the counts that show that the batches are the same."""
    names = {"losses": "loss", "gradient_norms": "grad_norm", "samples": "samples", "labels": "label_tokens"}
    return {name: [line[key] for line in lines] for name, key in names.items()} | balance(lines)


def noted_figures(notes: Path) -> dict[str, Any]:
    """Peak memory of each rank, and the time of odb's metadata exchange where there was one."""
    memory = [json.loads(path.read_text()) for path in _by_rank(notes.glob("rank-*.json"))]
    on_gpu = all(one["gpu"] for one in memory)
    figures: dict[str, Any] = {
        "peak_gb": max(one["gpu"] or one["process"] for one in memory) / 1e9,
        "peak_gb_per_rank": [(one["gpu"] or one["process"]) / 1e9 for one in memory],
        "peak_of": "GPU" if on_gpu else "process",
    }
    exchanges = [_json_lines(path) for path in _by_rank(notes.glob("exchange-*.jsonl"))]
    rounds = min(map(len, exchanges), default=0)
    if rounds:
        seconds = np.array([[spent for _, spent in one[:rounds]] for one in exchanges])  # [ranks, rounds]
        figures |= {
            "exchange_rounds": rounds,
            # waiting for the slowest rank is in it; the rank that waits least pays for the exchange alone
            "exchange_seconds_per_rank": seconds.sum(axis=1).tolist(),
            "exchange_ms_alone": float(np.median(seconds.min(axis=0)) * 1e3),
            "exchange_seconds_alone": float(seconds.min(axis=0).sum()),
        }
    return figures


def evaluate(
    folder: Path, what: str, ranks: int, *, items: int, cuda: bool, threads: int, timeout: float
) -> dict[str, Any]:
    """One evaluation of the model of ``folder``; ``what`` is ``validation loss`` or ``letters``."""
    output = evaluation_folder(folder, what, ranks)
    data = (
        ("--data", str(folder / "tmdb"), "--validation", str(folder / "validation"), "--val-size", str(items))
        if what == "validation loss"
        else ("--dataset", str(folder / "multiple-choice"))
    )
    ended = launch(
        SCRIPTS / ("eval_valloss.py" if what == "validation loss" else "eval_benchmark.py"),
        [
            *("--checkpoint", str(folder / "model"), "--output-dir", str(output)),
            *("--max-samples", str(items), *data),
            *(() if cuda else ("--device", "cpu", "--num-workers", "1", "--token-budget", "1024")),
        ],
        processes=ranks,
        cuda=cuda,
        threads=threads,
        log=folder / f"{output.name}.log",
        timeout=timeout,
    )
    record = json.loads((output / "run_record.json").read_text())
    return {
        "ranks": ranks,
        "scoring_seconds": record["scoring_seconds"],
        "samples_on_rank_0": record["samples_scored_on_rank_0"],
        "samples_per_second_on_rank_0": record["samples_per_second_on_rank_0"],
        "launched_seconds": ended.seconds,
        "orphans": ended.orphans,
    }


def evaluation_folder(folder: Path, what: str, ranks: int) -> Path:
    """Where an evaluation writes."""
    return folder / f"{what.replace(' ', '-')}-on-{ranks}"


def compare_evaluations(folder: Path, what: str, ranks: int) -> dict[str, Any]:
    """What differs between the results on several ranks and on one."""
    name = "per_sample_losses.jsonl" if what == "validation loss" else "predictions.jsonl"
    many, one = (_json_lines(evaluation_folder(folder, what, world) / name) for world in (ranks, 1))
    if [line["id"] for line in many] != [line["id"] for line in one]:
        raise ValueError(f"{what}: other items on {ranks} ranks ({len(many)}) than on one ({len(one)})")
    pairs = list(zip(many, one, strict=True))
    figures = {"items": len(one), "identical": many == one}
    if what == "validation loss":
        means = [sum(line["loss"] for line in lines) / len(lines) for lines in (many, one)]
        return figures | {
            "mean_loss": means[1],
            "mean_difference": abs(means[0] - means[1]),
            "largest_difference": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        }
    return figures | {
        "equal_letters": sum(a["prediction"] == b["prediction"] for a, b in pairs),
        "largest_difference": max(
            abs(score - b["candidate_scores"][letter])
            for a, b in pairs
            for letter, score in a["candidate_scores"].items()
        ),
    }


def _by_rank(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: int(path.stem.rpartition("-")[2]))


def _json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
