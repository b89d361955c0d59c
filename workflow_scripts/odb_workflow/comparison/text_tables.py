"""The comparison as CSV and Markdown."""

from __future__ import annotations

import csv
import io
from typing import Any

from .metrics import METRICS, Metric, is_finite

NOT_APPLICABLE = "–"

# Columns of the Markdown table; the CSV and the JSON hold all metrics.
SHORT_KEYS = (
    "runtime_seconds",
    "samples_per_second",
    "real_tokens_per_second",
    "padding_ratio",
    "optimizer_steps",
    "train_loss",
    "eval_loss",
    "token_weighted_eval_loss",
)


def cell(row: dict[str, Any], metric: Metric) -> str:
    """A metric of a row as text; a dash where it has no meaning for this arm."""
    if metric.key in row["not_applicable"]:
        return NOT_APPLICABLE
    value = row["metrics"][metric.key]
    if value is None and any(p["kind"] == "not finite" and p["what"] == metric.key for p in row["problems"]):
        return "not finite"
    return metric.show(value)


def csv_text(comparison: dict[str, Any]) -> str:
    """One line per arm with every metric in base units, then the published rows; empty where missing."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    keys = [metric.key for metric in METRICS]
    extra = [
        "speedup_samples_per_second",
        "delta_eval_loss",
        "delta_token_weighted_eval_loss",
        "delta_mmmu_accuracy",
    ]
    writer.writerow(["arm", "origin", "loader", "status", *keys, *extra])
    by_arm = {item["arm"]: item for item in comparison["differences"]}
    for row in comparison["arms"]:
        item = by_arm.get(row["name"])
        speed = (item or {}).get("speed") or {}
        derived = [speed.get("samples_per_second", {}).get("whole")]
        deltas = (item or {}).get("deltas", {})
        derived += [deltas.get(key) for key in ("eval_loss", "token_weighted_eval_loss", "mmmu_accuracy")]
        values = [*(row["metrics"][key] for key in keys), *derived]
        writer.writerow(
            [row["name"], "measured", row["loader"] or "", row["status"]]
            + [value if is_finite(value) else "" for value in values]
        )
    for row in comparison["published"]:
        known = {key: row.get(key) for key in ("samples_per_second", "eval_loss", "mmmu_accuracy")}
        writer.writerow(
            [f"{row['path']} ({row['loader']})", row["origin"], row["loader"], row["setting"]]
            + [known.get(key) if known.get(key) is not None else "" for key in keys]
            + [row["speedup"], "", "", ""]
        )
    return buffer.getvalue()


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[text.replace("|", "\\|") for text in row] for row in rows]
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in escaped),
        "",
    ]


def mmmu_cell(row: dict[str, Any]) -> str:
    """Accuracy, standard error and number of rows in one cell."""
    metrics = row["metrics"]
    if not is_finite(metrics["mmmu_accuracy"]):
        return "missing" if metrics["mmmu_accuracy"] is None else "not finite"
    error = metrics["mmmu_standard_error"]
    plus = f" ± {100 * error:.2f}" if is_finite(error) else ""
    n = f" (n={metrics['mmmu_n']:,.0f})" if is_finite(metrics["mmmu_n"]) else ""
    return f"{100 * metrics['mmmu_accuracy']:.2f}{plus}{n}"


def markdown_text(comparison: dict[str, Any], figures: list[dict[str, str]]) -> str:
    """The comparison for a terminal, a pull request or a notebook."""
    chosen = [metric for metric in METRICS if metric.key in SHORT_KEYS]
    lines = [
        f"# Comparison of the run `{comparison['run']}`",
        "",
        f"Reference arm: `{comparison['reference_arm']}`. "
        f"Intervals are {comparison['level']:.0%} intervals, differences are arm minus reference.",
        "",
    ]
    for answer in comparison["answers"]:
        lines += [
            f"**{answer['arm']}** against {answer['reference']}:",
            "",
            f"- how much faster: {answer['faster']}",
            f"- in tokens: {answer['faster_tokens']}",
            *([f"- the other arms: {answer['against_others']}"] if answer["against_others"] else []),
            f"- from where: {answer['from_where']}",
            *(f"- quality: {text}" for text in answer["quality"]),
            f"- how sure: {answer['sure']}",
            "",
        ]
    lines += ["## Arms", ""]
    head = ["Arm", *(metric.heading for metric in chosen), "MMMU-MC (% ± standard error)"]
    lines += _table(
        head,
        [
            [row["name"], *(cell(row, metric) for metric in chosen), mmmu_cell(row)]
            for row in comparison["arms"]
        ],
    )
    lines += ["## Published figures (not measured here)", ""]
    lines += _table(
        [
            "Path",
            "Loader",
            "samples/s",
            "ratio",
            "validation loss (as published, kind not stated)",
            "MMMU-MC (%)",
        ],
        [
            [
                row["path"],
                row["loader"],
                f"{row['samples_per_second']:.2f}",
                f"{row['speedup']:.2f}",
                f"{row['eval_loss']:.4f}",
                f"{100 * row['mmmu_accuracy']:.2f}",
            ]
            for row in comparison["published"]
        ],
    )
    lines += [f"Setting: {comparison['published'][0]['setting']}. Other hardware, model weights or data than "
              "above: only the ratios are worth a look.", ""]  # fmt: skip
    fairness = comparison["fairness"]
    lines += ["## Fairness", ""]
    if data := comparison["data"]:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in data["rejected_by_reason"].items())
        counts = f"{data['records']:,}, accepted {data['accepted']:,}, rejected {data['rejected']:,}"
        lines += [f"Records: {counts}{f' ({reasons})' if reasons else ''}.", ""]
    same = {True: "equal (checksum of the emitted ids)", False: "DIFFERENT", None: "not proven"}
    lines += [f"Training samples of the arms: {same[fairness['same_ids']]}.", ""]
    lines += [f"- warning: {text}" for text in [*fairness["warnings"], *comparison["other_code"]]]
    lines += [f"- note: {text}" for text in fairness["notes"]]
    if comparison["problems"]:
        lines += ["", "## Missing or not finite", ""]
        lines += [
            f"- {p['arm']}: {p['what']} {p['kind']}: {p['reason']}" + (f" ({p['path']})" if p["path"] else "")
            for p in comparison["problems"]
        ]
    out = comparison["left_out"]
    lines += ["", "## Left out", ""]
    lines += [f"- loader `{item['loader']}` ({item['what']}) was not run" for item in out["loaders_not_run"]]
    if out["packing_not_run"]:
        lines.append("- no arm packs its batches; packing takes much of what grouping by length gives")
    if out["single_seed"]:
        lines.append("- one training seed per arm")
    lines += [f"- to run them: `{out['command']}`", "", *(f"{note}\n" for note in comparison["notes"])]
    if figures:
        lines += ["## Figures", ""]
        lines += [
            f"![{item['title']}](figures/{item['name']}.png)\n\n{item['caption']}\n" for item in figures
        ]
    lines += ["## Reproduce", "", f"`{comparison['reproduce']}`", ""]
    return "\n".join(lines)
