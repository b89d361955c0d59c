"""One row per arm: the metrics of every seed, their mean and interval, and what is missing or not finite."""

from __future__ import annotations

import math
from typing import Any

from .collect import ArmResult, RunResult
from .metrics import METRICS, TRAINING, is_finite
from .statistics import mean_interval, proportion_standard_error

RELATIVE_TOLERANCE = 1e-3


def _number(value: Any) -> float | None:
    """The value where it is a number (NaN included), else None."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _pick(source: dict[str, Any] | None, *keys: str) -> float | None:
    for key in keys:
        if source is not None and key in source:
            # JSON has no NaN: a null under a known key is a number that was not finite.
            return math.nan if source[key] is None else _number(source[key])
    return None


def run_metrics(run: RunResult) -> dict[str, float | None]:
    """All metrics of one run; None where missing, NaN where the stored value is null or not finite."""
    summary, validation, benchmark = run.summary, run.validation, run.benchmark
    runtime, wait = _pick(summary, "runtime_seconds"), _pick(summary, "data_wait_seconds")
    accuracy = _pick(benchmark, "accuracy")
    scored = _pick(benchmark, "num_scored", "evaluated_samples")
    error = _pick(benchmark, "standard_error")
    if run.predictions is not None:
        scored = float(len(run.predictions)) if scored is None else scored
        accuracy = float(run.predictions["correct"].mean()) if accuracy is None else accuracy
    if error is None and is_finite(accuracy) and is_finite(scored):
        error = proportion_standard_error(accuracy or 0.0, int(scored or 0))
    return {
        "runtime_seconds": runtime,
        "samples_per_second": _pick(summary, "effective_emitted_samples_per_second"),
        "real_tokens_per_second": _pick(summary, "real_tokens_per_second"),
        "padding_ratio": _pick(summary, "padding_ratio"),
        "optimizer_steps": _pick(summary, "optimizer_steps", "global_step"),
        "samples_per_step": _pick(summary, "mean_emitted_samples_per_step"),
        "emitted_samples": _pick(summary, "emitted_samples"),
        "train_loss": _pick(summary, "train_loss"),
        "eval_loss": _pick(validation, "eval_loss"),
        "token_weighted_eval_loss": _pick(validation, "token_weighted_eval_loss"),
        "eval_samples": _pick(validation, "eval_samples"),
        "mmmu_accuracy": accuracy,
        "mmmu_standard_error": error,
        "mmmu_n": scored,
        "data_wait_share": wait / runtime if is_finite(wait) and is_finite(runtime) and runtime else None,
        "startup_seconds": _pick(summary, "startup_seconds"),
        "peak_memory_bytes": _number((summary or {}).get("peak_memory_bytes_gpu"))
        or _number((summary or {}).get("peak_memory_bytes")),
    }


def run_problems(run: RunResult, metrics: dict[str, float | None]) -> list[dict[str, Any]]:
    """Missing files, missing or non-finite metrics, and stored numbers that their own rows contradict."""
    problems: list[dict[str, Any]] = [
        {"arm": note.arm, "seed": note.seed, "kind": "missing", "what": note.stage, "reason": note.reason,
         "path": note.path}
        for note in run.notes
    ]  # fmt: skip
    missing_stages = {note.stage for note in run.notes}

    def problem(kind: str, what: str, reason: str) -> None:
        problems.append(
            {"arm": run.arm, "seed": run.seed, "kind": kind, "what": what, "reason": reason, "path": None}
        )

    for metric in METRICS:
        value = metrics[metric.key]
        if metric.stage == TRAINING and not run.trained:
            continue
        if value is not None and not math.isfinite(value):
            problem("not finite", metric.key, "the stored value is not a finite number")
        elif value is None and metric.required and metric.stage not in missing_stages:
            problem("missing", metric.key, "the result file lacks this number")
    checks = []
    if run.losses is not None:
        checks = [
            ("eval_loss", float(run.losses["loss"].mean())),
            (
                "token_weighted_eval_loss",
                float(run.losses["loss_sum"].sum() / run.losses["label_tokens"].sum()),
            ),
        ]
    if run.predictions is not None:
        checks.append(("mmmu_accuracy", float(run.predictions["correct"].mean())))
    for key, again in checks:
        stored = metrics[key]
        if is_finite(stored) and is_finite(again):
            if abs(stored - again) > RELATIVE_TOLERANCE * max(abs(stored), abs(again)):
                problem("contradiction", key, f"stored {stored:.6g}, but its own rows give {again:.6g}")
        elif is_finite(stored):
            problem("contradiction", key, "stored as finite, but its own rows are not")
    return problems


def arm_row(arm: ArmResult, level: float) -> dict[str, Any]:
    """The comparison row of one arm.

    Returns:
        ``name``, ``loader``, ``settings``, ``status`` (``complete``, ``partial`` or ``missing``), ``metrics``
        (means over seeds), ``intervals`` (over seeds, where there are several), ``seeds`` (per seed),
        ``not_applicable`` (metrics without a meaning for this arm) and ``problems``.
    """
    per_seed = [{"seed": run.seed, "metrics": run_metrics(run)} for run in arm.runs]
    problems = [
        problem
        for run, one in zip(arm.runs, per_seed, strict=True)
        for problem in run_problems(run, one["metrics"])
    ]
    if arm.empty:  # one line instead of one per file and number
        stages = ", ".join(dict.fromkeys(note.stage for note in arm.notes))
        reasons = "; ".join(dict.fromkeys(note.reason for note in arm.notes))
        problems = [
            {
                "arm": arm.name,
                "seed": None,
                "kind": "missing",
                "what": stages,
                "reason": reasons,
                "path": str(arm.runs[0].folder),
            }
        ]
    metrics: dict[str, float | None] = {}
    intervals: dict[str, list[float | None]] = {}
    for metric in METRICS:
        values = [one["metrics"][metric.key] for one in per_seed]
        known = [value for value in values if value is not None]
        if not known:
            metrics[metric.key] = None
        elif len(known) == 1:
            metrics[metric.key] = known[0]
        else:
            estimate = mean_interval(known, level)
            metrics[metric.key] = estimate.value
            intervals[metric.key] = [estimate.low, estimate.high]
    summary = arm.first("summary") or {}
    status = "missing" if arm.empty else "partial" if problems else "complete"
    trained = all(run.trained for run in arm.runs)
    return {
        "name": arm.name,
        "loader": summary.get("loader") if trained else None,
        "settings": {
            key: summary.get(key)
            for key in ("padding", "token_budget", "buffer_size", "fixed_batch_size", "loss_scaling", "join")
            if summary.get(key) is not None
        },
        "status": status,
        "metrics": metrics,
        "intervals": intervals,
        "seeds": per_seed,
        "not_applicable": [] if trained else [metric.key for metric in METRICS if metric.stage == TRAINING],
        "excluded": arm.first("excluded") if any(run.benchmark for run in arm.runs) else {},
        "problems": problems,
    }


def arm_words(row: dict[str, Any]) -> str:
    """Loader and its main setting, in a few words."""
    settings, words = row["settings"], [str(row["loader"])]
    if row["loader"] in ("standard", "length_grouped") and "fixed_batch_size" in settings:
        words.append(f"batch {settings['fixed_batch_size']}")
    elif "token_budget" in settings:
        words.append(f"budget {settings['token_budget']:,}")
    return ", ".join([*words, *([str(settings["padding"])] if "padding" in settings else [])])
