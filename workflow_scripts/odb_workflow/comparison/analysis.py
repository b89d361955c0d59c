"""Build the content of ``comparison.json``, the source of truth of every other output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from odb_workflow.evaluation.mmmu_subjects import category_order
from odb_workflow.runtime.errors import UserError
from odb_workflow.runtime.provenance import provenance

from .collect import UNTRAINED, ArmResult
from .differences import adjust_mcnemar, difference
from .fairness import fairness
from .metrics import is_finite
from .published import published_rows
from .rows import arm_row, arm_words
from .statistics import LEVEL, above_chance, proportion
from .throughput import steady_estimate, time_shares, window_rates

FORMAT = 1
LOADER_KINDS = {
    "standard": "fixed batch size",
    "odb": "Online Dynamic Batching",
    "length_grouped": "grouped by length within mega-batches",
    "token_budget": "offline oracle: lengths measured first, batches filled to the budget",
}
MMMU_NOTE = (
    "MMMU-MC is a choice likelihood: the letter with the highest next-token log-probability wins. It is not "
    "comparable with leaderboards that generate an answer."
)
SEED_NOTE = (
    "Intervals over validation samples or questions compare these checkpoints. They do not include what "
    "another training seed would change; only several seeds show that."
)
_CODE_VERSION = re.compile(r"^CODE_VERSION\s*=\s*(\d+)", re.MULTILINE)


def code_version(script: Path) -> int | None:
    """The ``CODE_VERSION`` in a program's text; None where there is none."""
    try:
        match = _CODE_VERSION.search(script.read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(match.group(1)) if match else None


def other_code(arms: Sequence[ArmResult], scripts: Path) -> list[str]:
    """Sentences that name results made by another version of their program than the present one."""
    found = []
    for attribute, script in (
        ("summary", "train_accelerate.py"),
        ("validation", "eval_valloss.py"),
        ("benchmark", "eval_benchmark.py"),
    ):
        present = code_version(scripts / script)
        for arm in arms:
            recorded = (arm.first(attribute) or {}).get("code_version")
            if present is not None and recorded is not None and recorded != present:
                found.append(f"{arm.name}: made by {script} of code version {recorded}, now {present}")
    return found


def categories(arm: ArmResult, level: float) -> list[dict[str, Any]]:
    """MMMU-MC per category with Wilson intervals, from the first seed that has predictions."""
    predictions = arm.first("predictions")
    if predictions is None:
        return []
    rows = []
    grouped = dict(list(predictions.groupby("category")))
    for category in sorted(grouped, key=lambda name: (category_order(str(name)), str(name))):
        part = grouped[category]
        estimate = proportion(int(part["correct"].sum()), len(part), level)
        rows.append({"category": str(category), **estimate.as_dict()})
    return rows


def sources(arm: ArmResult) -> list[dict[str, Any]]:
    """Validation loss per source, mean over samples, from the first seed that has per-sample losses."""
    losses = arm.first("losses")
    if losses is None:
        return []
    grouped = losses.groupby("source", sort=True)
    return [
        {
            "source": str(source),
            "samples": len(part),
            "label_tokens": int(part["label_tokens"].sum()),
            "eval_loss": float(part["loss"].mean()),
            "token_weighted_eval_loss": float(part["loss_sum"].sum() / part["label_tokens"].sum()),
        }
        for source, part in grouped
    ]


def throughput_facts(arm: ArmResult, level: float) -> dict[str, Any]:
    """Warm-up and steady rates, their spread over windows, and where the time goes; first seed."""
    run = next((run for run in arm.runs if run.summary is not None), None)
    if run is None:
        return {}
    rates = window_rates(run.steps) if run.steps is not None else None
    facts: dict[str, Any] = {
        "warmup": None,
        "steady": None,
        "time": time_shares(run.summary or {}, run.steps),
    }
    if rates:
        facts.update(warmup=rates["warmup"], steady=rates["steady"], windows=rates["windows"])
        for key in ("samples_per_second", "real_tokens_per_second"):
            estimate = steady_estimate(rates, key)
            facts[f"steady_{key}"] = estimate.as_dict() if estimate else None
    return facts


def learning(arm: ArmResult, row: dict[str, Any], untrained: dict[str, Any] | None) -> dict[str, Any]:
    """Did the model learn: validation loss against the untrained model, MMMU-MC against guessing."""
    base = (untrained or {}).get("metrics", {})
    reduction = {}
    for key in ("eval_loss", "token_weighted_eval_loss"):
        now, before = row["metrics"][key], base.get(key)
        reduction[key] = 1 - now / before if is_finite(now) and is_finite(before) and before else None
    predictions = arm.first("predictions")
    chance, p_value = None, None
    if predictions is not None and predictions["chance"].notna().all():
        chance = float(predictions["chance"].mean())
        p_value = above_chance(predictions["correct"], predictions["chance"])
    return {"loss_reduction": reduction, "mmmu_chance": chance, "mmmu_above_chance_p": p_value}


def left_out(arms: Sequence[ArmResult], rows: list[dict[str, Any]], study_command: str) -> dict[str, Any]:
    """What this comparison does not show: arms without results, loaders and packing that were not run."""
    ran = {row["loader"] for row in rows if row["loader"]}
    packed = any(row["settings"].get("padding") == "pack" for row in rows)
    return {
        "missing_arms": [
            {"arm": arm.name, "reason": "; ".join(dict.fromkeys(note.reason for note in arm.notes))}
            for arm in arms
            if arm.empty
        ],
        "loaders_not_run": [
            {"loader": name, "what": what} for name, what in LOADER_KINDS.items() if name not in ran
        ],
        "packing_not_run": not packed,
        "single_seed": all(len(arm.runs) == 1 for arm in arms),
        "command": study_command,
    }


def against_others(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> str | None:
    """Speed of one arm against each other one, so that a weak reference misleads nobody; None without others.

    A small fixed batch that is padded makes any batching look fast; the same batch packed is the harder test.
    """
    own = row["metrics"]["samples_per_second"]
    parts = []
    for other in others:
        speed = other["metrics"]["samples_per_second"]
        if is_finite(own) and is_finite(speed) and speed:
            parts.append(f"{own / speed:.2f} times {other['name']} ({arm_words(other)})")
    return "samples/s over the whole training: " + "; ".join(parts) if parts else None


def answers(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Per arm, the plain answers to: how much faster, from where, at what quality, how sure."""
    rows = {row["name"]: row for row in comparison["arms"]}
    found = []
    for index, item in enumerate(comparison["differences"]):
        row, base = rows[item["arm"]], rows[item["reference"]]
        if item["arm"] == UNTRAINED:
            continue
        where = []
        for key, label, digits, factor, unit in (
            ("padding_ratio", "padding", 1, 100, " %"),
            ("optimizer_steps", "optimizer steps", 0, 1, ""),
            ("samples_per_step", "samples per step", 1, 1, ""),
            ("data_wait_share", "time waiting for data", 1, 100, " %"),
        ):
            now, before = row["metrics"][key], base["metrics"][key]
            if is_finite(now) and is_finite(before):
                where.append(
                    f"{label} {before * factor:,.{digits}f}{unit} → {now * factor:,.{digits}f}{unit}"
                )
        loss, mmmu, speed = item["validation_loss"], item["mmmu"], item["speed"]
        token_loss = (
            f"validation loss per token {loss['token_weighted_sentence']}"
            if loss
            else "validation loss not comparable: rows are missing"
        )
        sample_loss = f"validation loss per sample {loss['sentence']}" if loss else None
        score = f"MMMU-MC {mmmu['sentence']}" if mmmu else "MMMU-MC not comparable: rows are missing"
        sure = [part["over"] for part in (loss, mmmu) if part]
        count = max((part["seeds"] for part in (loss, mmmu) if part), default=1)
        seeds = "one training seed" if count == 1 else f"{count} training seeds"
        found.append(
            {
                "arm": item["arm"],
                "reference": item["reference"],
                "difference": index,
                "faster": speed["samples_per_second"]["sentence"] if speed else "not trained",
                "faster_tokens": speed["real_tokens_per_second"]["sentence"] if speed else "not trained",
                "against_others": against_others(
                    row,
                    [
                        other
                        for name, other in rows.items()
                        if name not in (item["arm"], item["reference"], UNTRAINED)
                    ],
                ),
                "from_where": "; ".join(where) or "not known: training figures are missing",
                "quality": [text for text in (sample_loss, token_loss, score) if text],
                "sure": f"{' and '.join(sure)}; {seeds} per arm" if sure else "no interval",
            }
        )
    return found


def analyze(
    arms: Sequence[ArmResult],
    *,
    run: str,
    reference: str,
    scripts: Path,
    study_command: str,
    reproduce_command: str,
    data: dict[str, Any] | None = None,
    level: float = LEVEL,
) -> dict[str, Any]:
    """Everything that the comparison says, as one structure of plain values.

    Raises:
        UserError: the reference is not among the arms.
    """
    by_name = {arm.name: arm for arm in arms}
    if reference not in by_name:
        raise UserError(
            f"the reference arm {reference!r} is not among the arms: {', '.join(by_name)}",
            where="comparison reference arm",
            fix="name one of the arms",
        )
    rows = {arm.name: arm_row(arm, level) for arm in arms}
    for arm in arms:
        row = rows[arm.name]
        row["throughput"] = throughput_facts(arm, level)
        row["valloss_per_source"] = sources(arm)
        row["mmmu_per_category"] = categories(arm, level)
        row["learning"] = learning(arm, row, rows.get(UNTRAINED))
    differences = [
        difference(arm, by_name[reference], rows[arm.name], rows[reference], level)
        for arm in arms
        if arm.name != reference and not arm.empty and not by_name[reference].empty
    ]
    adjust_mcnemar(differences)
    comparison: dict[str, Any] = {
        "format": FORMAT,
        "run": run,
        "reference_arm": reference,
        "level": level,
        "arms": list(rows.values()),
        "differences": differences,
        "data": data,
        "fairness": fairness(list(arms), reference),
        "other_code": other_code(arms, scripts),
        "left_out": left_out(arms, list(rows.values()), study_command),
        "published": published_rows(),
        "notes": [MMMU_NOTE, SEED_NOTE],
        "problems": [problem for row in rows.values() for problem in row["problems"]],
        "reproduce": reproduce_command,
        "provenance": provenance(),
    }
    comparison["answers"] = answers(comparison)
    return comparison
