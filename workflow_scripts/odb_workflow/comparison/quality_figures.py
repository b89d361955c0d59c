"""Figures that show quality: validation loss per source, MMMU-MC per category, throughput-quality plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .collect import UNTRAINED
from .metrics import is_finite
from .style import INK, SOFT, arm_styles, figure_title, legend_below, new_figure


def _offsets(count: int) -> np.ndarray:
    return (np.arange(count) - (count - 1) / 2) * min(0.22, 0.7 / max(count, 1))


def valloss_by_source(rows: Sequence[dict[str, Any]], order: Sequence[str]) -> Any | None:
    """Validation loss per source of each trained arm."""
    rows = [row for row in rows if row["valloss_per_source"] and row["name"] != UNTRAINED]
    if not rows:
        return None
    styles = arm_styles(order)
    names = sorted({item["source"] for row in rows for item in row["valloss_per_source"]})
    figure, axes = new_figure(height=max(3.3, 1.6 + 0.42 * len(names)))
    for offset, row in zip(_offsets(len(rows)), rows, strict=True):
        by_source = {item["source"]: item for item in row["valloss_per_source"]}
        style = styles[row["name"]]
        points = [
            (by_source[name]["eval_loss"], position + offset)
            for position, name in enumerate(names)
            if name in by_source and is_finite(by_source[name]["eval_loss"])
        ]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="", marker=style.marker, markersize=6,
                      color=style.color, label=row["name"])  # fmt: skip
    counts = {item["source"]: item["samples"] for row in rows for item in row["valloss_per_source"]}
    axes.set_yticks(range(len(names)), [f"{name} (n={counts[name]:,})" for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    figure_title(figure, "Validation loss per source (nat, mean over samples)")
    axes.set_xlabel("validation loss; less is better")
    legend_below(figure, axes)
    return figure


def valloss_difference(differences: Sequence[dict[str, Any]], order: Sequence[str]) -> Any | None:
    """Paired difference of validation loss from the reference, per source and in all, with intervals."""
    found = [item for item in differences if item["validation_loss"] is not None and item["arm"] != UNTRAINED]
    if not found:
        return None
    styles = arm_styles(order)
    names = ["all samples", *sorted({s["source"] for d in found for s in d["validation_loss"]["per_source"]})]
    figure, axes = new_figure(height=max(3.3, 1.6 + 0.42 * len(names)))
    axes.axvline(0, color=INK, linewidth=1)
    for offset, item in zip(_offsets(len(found)), found, strict=True):
        block, style = item["validation_loss"], styles[item["arm"]]
        parts = {
            "all samples": block["mean"],
            **{part["source"]: part for part in block["per_source"]},
        }
        labelled = False
        for position, name in enumerate(names):
            part = parts.get(name)
            if part is None or not is_finite(part["value"]):
                continue
            if part["low"] is not None:
                ends = [part["low"], part["high"]]
                axes.plot(ends, [position + offset] * 2, color=style.color, linewidth=2, marker="|")
            axes.plot(part["value"], position + offset, color=style.color, marker=style.marker, markersize=6,
                      linestyle="", label=None if labelled else item["arm"])  # fmt: skip
            labelled = True
    counts = {s["source"]: s["n"] for d in found for s in d["validation_loss"]["per_source"]}
    counts["all samples"] = max(d["validation_loss"]["mean"]["n"] for d in found)
    axes.set_yticks(range(len(names)), [f"{name} (n={counts[name]:,})" for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    figure_title(figure, f"Validation loss minus that of {found[0]['reference']} (nat)")
    axes.set_xlabel("difference; left of zero is better")
    legend_below(figure, axes)
    return figure


def mmmu_by_category(rows: Sequence[dict[str, Any]], order: Sequence[str], level: float) -> Any | None:
    """MMMU-MC per category with Wilson intervals."""
    rows = [row for row in rows if row["mmmu_per_category"]]
    if not rows:
        return None
    styles = arm_styles(order)
    names = list(dict.fromkeys(item["category"] for row in rows for item in row["mmmu_per_category"]))
    figure, axes = new_figure(height=max(3.3, 1.6 + 0.5 * len(names)))
    for offset, row in zip(_offsets(len(rows)), rows, strict=True):
        by_category = {item["category"]: item for item in row["mmmu_per_category"]}
        style, labelled = styles[row["name"]], False
        for position, name in enumerate(names):
            item = by_category.get(name)
            if item is None or not is_finite(item["value"]):
                continue
            if item["low"] is not None:
                ends = [100 * item["low"], 100 * item["high"]]
                axes.plot(ends, [position + offset] * 2, color=style.color, linewidth=2)
            axes.plot(100 * item["value"], position + offset, color=style.color, marker=style.marker,
                      markersize=6, linestyle="", label=None if labelled else row["name"])  # fmt: skip
            labelled = True
    counts = {item["category"]: item["n"] for row in rows for item in row["mmmu_per_category"]}
    chances = [row["learning"]["mmmu_chance"] for row in rows if row["learning"]["mmmu_chance"]]
    if chances:
        axes.axvline(100 * chances[0], color=SOFT, linestyle=":", linewidth=1.4, label="guessing")
    axes.set_yticks(range(len(names)), [f"{name} (n={counts[name]:,})" for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    figure_title(figure, f"MMMU-MC per category (% right, {100 * level:.0f} % interval)")
    axes.set_xlabel("% of questions answered right")
    legend_below(figure, axes)
    return figure


def quality_plane(rows: Sequence[dict[str, Any]]) -> Any | None:
    """Throughput against validation loss per sample: all arms in one plane."""
    styles = arm_styles([row["name"] for row in rows])
    found = [
        row
        for row in rows
        if is_finite(row["metrics"]["samples_per_second"]) and is_finite(row["metrics"]["eval_loss"])
    ]
    if not found:
        return None
    figure, axes = new_figure()
    for row in found:
        style, metrics = styles[row["name"]], row["metrics"]
        x, y = metrics["samples_per_second"], metrics["eval_loss"]
        for one in row["seeds"] if len(row["seeds"]) > 1 else ():
            pair = (one["metrics"]["samples_per_second"], one["metrics"]["eval_loss"])
            if is_finite(pair[0]) and is_finite(pair[1]):
                axes.plot(*pair, marker=style.marker, color=style.color, markersize=4, alpha=0.4)
        axes.plot(x, y, marker=style.marker, color=style.color, markersize=9, linestyle="", label=row["name"])
    axes.margins(0.25)
    axes.set_xlim(left=0)
    figure_title(figure, "Speed (samples/s) and validation loss per sample (nat)")
    axes.set_xlabel("emitted samples/s; best is right and low")
    axes.set_ylabel("validation loss per sample")
    legend_below(figure, axes)
    return figure
