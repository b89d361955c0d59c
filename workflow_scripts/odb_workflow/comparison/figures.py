"""Figures that show training: loss, throughput, time, batches, padding, lengths. Titles name the unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .collect import ArmResult
from .metrics import is_finite
from .style import GRID, INK, SOFT, arm_styles, legend_below, new_figure

MAX_POINTS = 300
TIME_PARTS = (("compute", "compute", ""), ("data_wait", "waiting for data", "///"), ("other", "other", "..."))


def thin(values: np.ndarray, weights: np.ndarray | None = None, points: int = MAX_POINTS) -> np.ndarray:
    """Means over at most ``points`` consecutive groups, ``[<=points]``; weighted where weights are given."""
    groups = np.array_split(np.arange(len(values)), min(points, len(values)))
    if weights is None:
        return np.array([values[group].mean() for group in groups])
    return np.array([np.average(values[g], weights=np.maximum(weights[g], 1e-12)) for g in groups])


def bar_height(bars: int) -> float:
    """Figure height in inches for that many horizontal bars; few keep the height of the other figures."""
    return max(3.3, 1.3 + 0.5 * bars)


def beside(axes: Any, x: float, y: float, text: str) -> None:
    """Write ``text`` just right of a point."""
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5)


def short(value: float) -> str:
    """A rate with three or four significant digits and no exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 3, 10, 30, ... written as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _steps(arm: ArmResult, *columns: str) -> pd.DataFrame | None:
    steps = arm.first("steps")
    return steps if steps is not None and len(steps) and set(columns) <= set(steps.columns) else None


def _column(steps: pd.DataFrame, name: str) -> np.ndarray:
    return pd.to_numeric(steps[name], errors="coerce").to_numpy(dtype=float)


def loss_curve(arms: Sequence[ArmResult], against: str) -> Any | None:
    """Training loss against emitted samples (``samples``) or wall-clock (``time``)."""
    styles = arm_styles([arm.name for arm in arms])
    figure, axes = new_figure()
    drawn = False
    for arm in arms:
        steps = _steps(arm, "loss", "label_tokens", "samples_total", "elapsed_seconds")
        if steps is None:
            continue
        loss, tokens = _column(steps, "loss"), _column(steps, "label_tokens")
        good = np.isfinite(loss)
        if not good.any():
            continue
        x = _column(steps, "samples_total" if against == "samples" else "elapsed_seconds")
        style = styles[arm.name]
        # About fifty groups of consecutive steps: single steps of small batches are noise.
        x_thin = thin(x[good], points=60)
        y_thin = thin(loss[good], tokens[good], points=60)
        axes.plot(x_thin, y_thin, color=style.color, linestyle=style.line, label=arm.name)
        axes.plot(x_thin[-1:], y_thin[-1:], color=style.color, marker=style.marker, markersize=6)
        drawn = True
    if not drawn:
        return None
    axes.set_title("Training loss (nat per label token)")
    axes.set_xlabel("emitted samples" if against == "samples" else "wall-clock time since start (s)")
    axes.set_ylabel("loss, mean over label tokens")
    legend_below(figure, axes)
    return figure


def throughput_bars(rows: Sequence[dict[str, Any]]) -> Any | None:
    """Whole-run and steady-state throughput per arm, in samples/s and real tokens/s, with intervals."""
    styles = arm_styles([row["name"] for row in rows])
    rows = [row for row in rows if is_finite(row["metrics"]["samples_per_second"])]
    if not rows:
        return None
    figure, panels = new_figure(2, 1, height=1.4 + 0.95 * len(rows))
    for axes, key, unit in (
        (panels[0], "samples_per_second", "samples/s"),
        (panels[1], "real_tokens_per_second", "real tokens/s"),
    ):
        for position, row in enumerate(rows):
            style = styles[row["name"]]
            whole = row["metrics"][key]
            steady = row["throughput"].get(f"steady_{key}")
            if is_finite(whole):
                axes.barh(
                    position - 0.19, whole, 0.36, color=style.color, edgecolor=INK, linewidth=0.6, hatch=""
                )
                beside(axes, whole, position - 0.19, short(whole))
            if steady:
                value, low, high = steady["value"], steady["low"], steady["high"]
                bar = axes.barh(
                    position + 0.19,
                    value,
                    0.36,
                    color=style.color,
                    edgecolor=INK,
                    linewidth=0.6,
                    hatch="////",
                )
                bar.patches[0].set_alpha(0.65)
                edge = value
                if low is not None and high is not None:
                    axes.plot([max(low, 0), high], [position + 0.19] * 2, color=INK, linewidth=1.6)
                    edge = max(value, high)
                beside(axes, edge, position + 0.19, short(value))
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.18)
        axes.set_xlim(left=0)
        axes.set_title(f"Throughput ({unit})")
    figure.supxlabel("plain: whole training; hatched: steady state with its 95 % interval", fontsize=9)
    return figure


def throughput_over_time(arms: Sequence[ArmResult]) -> Any | None:
    """Throughput along the training, real tokens/s over groups of consecutive steps."""
    styles = arm_styles([arm.name for arm in arms])
    figure, axes = new_figure()
    drawn = False
    for arm in arms:
        steps = _steps(arm, "real_tokens", "samples_total", "elapsed_seconds")
        if steps is None or len(steps) < 4:
            continue
        seconds = np.diff(_column(steps, "elapsed_seconds"), prepend=0.0)
        groups = np.array_split(np.arange(len(steps)), min(40, len(steps) // 2))
        tokens, total = _column(steps, "real_tokens"), _column(steps, "samples_total")
        rate = [tokens[g].sum() / max(seconds[g].sum(), 1e-9) for g in groups]
        style = styles[arm.name]
        axes.plot([total[g[-1]] for g in groups], rate, color=style.color, linestyle=style.line,
                  marker=style.marker, markersize=3, label=arm.name)  # fmt: skip
        drawn = True
    if not drawn:
        return None
    axes.set_ylim(bottom=0)
    axes.set_title("Throughput over time (real tokens/s)")
    axes.set_xlabel("emitted samples")
    axes.set_ylabel("real tokens/s")
    legend_below(figure, axes)
    return figure


def time_bars(rows: Sequence[dict[str, Any]]) -> Any | None:
    """Where the training time goes, stacked seconds per arm."""
    rows = [row for row in rows if row["throughput"].get("time")]
    if not rows:
        return None
    figure, axes = new_figure(height=bar_height(len(rows)))
    colors = ("#0072b2", "#e69f00", "#7f7f7f")
    left = np.zeros(len(rows))
    for (key, label, hatch), color in zip(TIME_PARTS, colors, strict=True):
        width = np.array([row["throughput"]["time"][key] for row in rows])
        axes.barh(range(len(rows)), width, 0.6, left=left, color=color, edgecolor=INK, linewidth=0.6,
                  hatch=hatch, label=label)  # fmt: skip
        left += width
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_title("Where the training time goes (s)")
    axes.set_xlabel("seconds")
    legend_below(figure, axes)
    return figure


def batches_over_time(arms: Sequence[ArmResult]) -> Any | None:
    """Samples per step and tokens per step along the training."""
    styles = arm_styles([arm.name for arm in arms])
    figure, panels = new_figure(2, 1, height=4.6)
    drawn = False
    for arm in arms:
        steps = _steps(arm, "samples", "real_tokens", "samples_total")
        if steps is None:
            continue
        style = styles[arm.name]
        pick = np.unique(np.linspace(0, len(steps) - 1, min(MAX_POINTS, len(steps))).astype(int))
        x = _column(steps, "samples_total")[pick]
        for axes, column in ((panels[0], "samples"), (panels[1], "real_tokens")):
            axes.scatter(x, _column(steps, column)[pick], s=9, color=style.color, marker=style.marker,
                         alpha=0.6, linewidths=0, label=arm.name)  # fmt: skip
        drawn = True
    if not drawn:
        return None
    panels[0].set_title("Samples per optimizer step (count), one point per step")
    panels[1].set_title("Real tokens per optimizer step (count)")
    panels[1].set_xlabel("emitted samples")
    for axes in panels:
        axes.set_ylim(bottom=0)
    legend_below(figure, panels[0])
    return figure


def padding_bars(rows: Sequence[dict[str, Any]], facts: dict[str, dict[str, Any]]) -> Any | None:
    """Real and padded tokens of each arm, in millions."""
    found = [
        (row, facts[row["name"]])
        for row in rows
        if {"real_tokens", "padded_tokens"} <= set(facts.get(row["name"], {}))
    ]
    if not found:
        return None
    figure, axes = new_figure(height=bar_height(len(found)))
    real = np.array([fact["real_tokens"] for _, fact in found]) / 1e6
    pad = np.array([fact["padded_tokens"] for _, fact in found]) / 1e6
    axes.barh(
        range(len(found)), real, 0.6, color="#0072b2", edgecolor=INK, linewidth=0.6, label="real tokens"
    )
    axes.barh(range(len(found)), pad, 0.6, left=real, color="#e69f00", edgecolor=INK, linewidth=0.6,
              hatch="///", label="padding")  # fmt: skip
    for position, (one, other) in enumerate(zip(real, pad, strict=True)):
        share = other / (one + other) if one + other else 0.0
        beside(axes, one + other, position, f"{share:.1%} padding")
    axes.set_yticks(range(len(found)), [row["name"] for row, _ in found])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.32)
    axes.set_xlim(left=0)
    axes.set_title("Tokens computed in training (millions)")
    axes.set_xlabel("million tokens")
    legend_below(figure, axes)
    return figure


def lengths_and_grouping(lengths: pd.DataFrame | None, arms: Sequence[ArmResult]) -> Any | None:
    """Histogram of sample lengths, and how each arm groups them: samples per step against mean length."""
    with_steps = [arm for arm in arms if _steps(arm, "samples", "real_tokens") is not None]
    if lengths is None and not with_steps:
        return None
    styles = arm_styles([arm.name for arm in arms])
    panels_wanted = (lengths is not None) + bool(with_steps)
    figure, panels = new_figure(panels_wanted, 1, height=2.7 * panels_wanted)
    panels = panels if isinstance(panels, list) else [panels]
    edges = None
    if lengths is not None:
        values = lengths["length"].to_numpy(dtype=float)
        edges = np.geomspace(max(values.min(), 1), values.max() + 1, 45)
        panels[0].hist(values, edges, color="#56b4e9", edgecolor=SOFT, linewidth=0.4)
        variation = values.std() / values.mean()
        panels[0].set_title("Length of the accepted records (tokens)")
        panels[0].set_ylabel("records")
        panels[0].set_xscale("log")
        plain_log(panels[0].xaxis)
        panels[0].text(0.99, 0.95, f"n = {len(values):,}, mean {values.mean():,.0f}, variation "
                       f"{variation:.2f}", ha="right", va="top", fontsize=8.5,
                       transform=panels[0].transAxes)  # fmt: skip
    if with_steps:
        axes = panels[-1]
        for arm in with_steps:
            steps = arm.first("steps")
            samples = _column(steps, "samples")
            mean = _column(steps, "real_tokens") / np.maximum(samples, 1)
            pick = np.unique(np.linspace(0, len(steps) - 1, min(MAX_POINTS, len(steps))).astype(int))
            style = styles[arm.name]
            axes.scatter(mean[pick], samples[pick], s=13, color=style.color, marker=style.marker,
                         alpha=0.6, linewidths=0, label=arm.name)  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        plain_log(axes.xaxis)
        plain_log(axes.yaxis)
        if edges is not None:
            axes.set_xlim(panels[0].get_xlim())
        axes.set_title("Grouping: samples per step by their length")
        axes.set_xlabel("mean length of the samples of an optimizer step (tokens)")
        axes.set_ylabel("samples in the step")
        legend_below(figure, axes)
        axes.grid(color=GRID)
    return figure
