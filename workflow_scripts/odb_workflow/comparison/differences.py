"""Paired comparison of one arm with the reference: speed, validation loss (all and per source), MMMU-MC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from .claims import difference_sentence, p_text, speed_sentence
from .collect import ArmResult, RunResult
from .metrics import is_finite
from .statistics import Estimate, exact_mcnemar, holm, mean_interval, paired_bootstrap
from .throughput import steady_ratio, window_rates


def paired_runs(arm: ArmResult, reference: ArmResult) -> list[tuple[RunResult, RunResult]]:
    """Runs to compare: equal seeds with each other; where only one side has seeds, the first of each."""
    by_seed = {run.seed: run for run in reference.runs}
    pairs = [(run, by_seed[run.seed]) for run in arm.runs if run.seed in by_seed]
    if pairs:
        return pairs
    # A single baseline (untrained, or one seed) stands against every seed of the arm.
    return [(run, reference.runs[0]) for run in arm.runs]


def join_rows(one: pd.DataFrame | None, other: pd.DataFrame | None) -> pd.DataFrame | None:
    """Rows of two tables with the same key, columns suffixed ``_a`` (arm) and ``_r`` (reference)."""
    if one is None or other is None:
        return None
    joined = one.merge(other, on="key", suffixes=("_a", "_r"), validate="one_to_one")
    return joined if len(joined) else None


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if is_finite(top) and is_finite(bottom) and bottom else None


def _minus(one: float | None, other: float | None) -> float | None:
    return one - other if is_finite(one) and is_finite(other) else None


def _loss_difference(joined: pd.DataFrame, level: float, weighted: bool) -> Estimate:
    if weighted:
        return paired_bootstrap(
            joined["loss_sum_a"] - joined["loss_sum_r"], joined["label_tokens_r"], level=level
        )
    return paired_bootstrap(joined["loss_a"] - joined["loss_r"], level=level)


def loss_block(pairs: list[tuple[RunResult, RunResult]], level: float) -> dict[str, Any] | None:
    """Validation-loss difference, candidate minus reference.

    Returns:
        None without paired rows; else ``mean`` and ``token_weighted`` (estimates), ``per_source`` (list of
        ``source`` and an estimate at the Bonferroni level of that many sources), ``pairs``, ``unpaired``,
        and one ``sentence`` each.
    """
    joined = [table for a, r in pairs if (table := join_rows(a.losses, r.losses)) is not None]
    joined = [table[np.isfinite(table["loss_a"]) & np.isfinite(table["loss_r"])] for table in joined]
    joined = [table for table in joined if len(table)]
    if not joined:
        return None
    first = joined[0]
    if len(joined) > 1:
        plain = mean_interval([float((t["loss_a"] - t["loss_r"]).mean()) for t in joined], level)
        weighted = mean_interval(
            [float((t["loss_sum_a"] - t["loss_sum_r"]).sum() / t["label_tokens_r"].sum()) for t in joined],
            level,
        )
        over = f"validation loss over {len(joined)} seeds"
    else:
        plain, weighted = _loss_difference(first, level, False), _loss_difference(first, level, True)
        over = f"{len(first):,} validation samples"
    sources = sorted(first["source_r"].unique())
    source_level = 1 - (1 - level) / max(len(sources), 1)
    per_source = []
    for source in sources:
        part = first[first["source_r"] == source]
        estimate = _loss_difference(part, source_level, False)
        per_source.append(
            {
                "source": source,
                **estimate.as_dict(),
                "sentence": difference_sentence(estimate, digits=4, better="lower", unit="nat"),
            }
        )
    left = max(len(pairs[0][0].losses), len(pairs[0][1].losses)) - len(first)  # type: ignore[arg-type]
    return {
        "mean": plain.as_dict(),
        "token_weighted": weighted.as_dict(),
        "per_source": per_source,
        "pairs": len(first),
        "unpaired": left,
        "over": over,
        "seeds": len(joined),
        "sentence": difference_sentence(plain, digits=4, better="lower", unit="nat"),
        "token_weighted_sentence": difference_sentence(weighted, digits=4, better="lower", unit="nat"),
    }


def _equals(text: str) -> str:
    return text if text.startswith("<") else f"= {text}"


def benchmark_block(pairs: list[tuple[RunResult, RunResult]], level: float) -> dict[str, Any] | None:
    """MMMU-MC difference, candidate minus reference, as shares (not percent); None without paired rows.

    One seed: bootstrap interval over questions and exact McNemar test; a difference is claimed only where
    both agree. Several seeds: t interval over the seeds' differences, and McNemar of each seed beside it.
    """
    joined = [table for a, r in pairs if (table := join_rows(a.predictions, r.predictions)) is not None]
    if not joined:
        return None
    tests = [exact_mcnemar(table["correct_r"], table["correct_a"]) for table in joined]
    gaps = [table["correct_a"].astype(float) - table["correct_r"].astype(float) for table in joined]
    if len(joined) > 1:
        estimate = mean_interval([float(gap.mean()) for gap in gaps], level)
        confirmed = True
        over = f"MMMU-MC over {len(joined)} seeds"
    else:
        estimate = paired_bootstrap(gaps[0], level=level)
        confirmed = tests[0]["p_value"] < 1 - level
        over = f"{len(gaps[0]):,} questions"
    sentence = difference_sentence(
        estimate, digits=2, better="higher", unit="points", scale=100, confirmed=confirmed
    )
    if len(joined) == 1:
        sentence += f", McNemar p {_equals(p_text(tests[0]['p_value']))}"
    return {
        "difference": estimate.as_dict(),
        "mcnemar": tests[0],
        "mcnemar_per_seed": tests if len(tests) > 1 else None,
        "pairs": len(joined[0]),
        "unpaired": max(len(pairs[0][0].predictions), len(pairs[0][1].predictions)) - len(joined[0]),  # type: ignore[arg-type]
        "over": over,
        "seeds": len(joined),
        "sentence": sentence,
    }


def speed_block(
    arm: ArmResult, reference: ArmResult, row: dict[str, Any], base: dict[str, Any], level: float
) -> dict[str, Any] | None:
    """Throughput ratios, candidate over reference; None for an arm without training."""
    if not arm.runs[0].trained:
        return None
    result: dict[str, Any] = {}
    pairs = paired_runs(arm, reference)
    for key in ("samples_per_second", "real_tokens_per_second"):
        whole = _ratio(row["metrics"][key], base["metrics"][key])
        over = "windows of the step log"
        if len(pairs) > 1:
            each = [
                _ratio((a.summary or {}).get(name), (r.summary or {}).get(name))
                for a, r in pairs
                for name in ["effective_emitted_samples_per_second" if key == "samples_per_second" else key]
            ]
            known = [ratio for ratio in each if ratio is not None]
            steady = mean_interval(known, level) if known else None
            over = f"{len(known)} training seeds, whole training"
        else:
            a, r = pairs[0]
            steady = (
                steady_ratio(window_rates(a.steps), window_rates(r.steps), key)
                if a.steps is not None and r.steps is not None
                else None
            )
        unit = "samples/s" if key == "samples_per_second" else "real tokens/s"
        result[key] = {
            "whole": whole,
            "interval": steady.as_dict() if steady else None,
            "over": over,
            "sentence": speed_sentence(whole, steady, unit, per_seed=len(pairs) > 1),
        }
    result["runtime_seconds"] = _ratio(base["metrics"]["runtime_seconds"], row["metrics"]["runtime_seconds"])
    return result


def difference(
    arm: ArmResult, reference: ArmResult, row: dict[str, Any], base: dict[str, Any], level: float
) -> dict[str, Any]:
    """All differences of one arm from the reference; parts that cannot be computed are None."""
    pairs = paired_runs(arm, reference)
    deltas = {
        key: _minus(row["metrics"][key], base["metrics"][key])
        for key in (
            "train_loss",
            "eval_loss",
            "token_weighted_eval_loss",
            "mmmu_accuracy",
            "padding_ratio",
            "optimizer_steps",
        )
    }
    return {
        "arm": arm.name,
        "reference": reference.name,
        "deltas": deltas,
        "speed": speed_block(arm, reference, row, base, level),
        "validation_loss": loss_block(pairs, level),
        "mmmu": benchmark_block(pairs, level),
    }


def adjust_mcnemar(differences: list[dict[str, Any]]) -> None:
    """Add Holm's adjusted p-value to the McNemar test of every difference, in place."""
    blocks = [item["mmmu"] for item in differences if item["mmmu"] is not None]
    for block, adjusted in zip(blocks, holm([b["mcnemar"]["p_value"] for b in blocks]), strict=True):
        block["mcnemar"]["p_value_holm"] = adjusted
