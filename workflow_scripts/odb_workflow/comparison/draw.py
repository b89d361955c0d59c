"""Draw all figures of a comparison: name, caption and drawing function in one list."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from . import figures, quality_figures
from .collect import ArmResult
from .style import RC, save

logger = logging.getLogger(__name__)


def draw_all(
    comparison: dict[str, Any], arms: Sequence[ArmResult], lengths: pd.DataFrame | None, folder: Path
) -> list[dict[str, str]]:
    """Write every figure that the results allow as PNG and SVG.

    Args:
        comparison: Content of ``comparison.json``.
        arms: Collected results.
        lengths: Lengths of the accepted records, or None.
        folder: Where the files go; made if need be.

    Returns:
        ``name``, ``title``, ``caption`` and ``svg`` (inline) of each figure drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, facts = comparison["arms"], comparison["fairness"]["facts"]
    names = [row["name"] for row in rows]
    plan: tuple[tuple[str, str, str, Callable[[], Any]], ...] = (
        (
            "throughput",
            "Throughput",
            "Whole training and steady state apart; the interval is over windows of the step log.",
            lambda: figures.throughput_bars(rows),
        ),
        (
            "quality_plane",
            "Throughput and quality",
            "Each arm by its speed and its validation loss: the best place is low and to the right.",
            lambda: quality_figures.quality_plane(rows),
        ),
        (
            "loss_by_samples",
            "Loss against samples",
            "Does an arm learn as much from the same number of samples? Means over groups of steps.",
            lambda: figures.loss_curve(arms, "samples"),
        ),
        (
            "loss_by_time",
            "Loss against wall-clock time",
            "How much is learned in the same time. Means over groups of steps.",
            lambda: figures.loss_curve(arms, "time"),
        ),
        (
            "time",
            "Where the time goes",
            "Time in steps, time spent waiting for a batch, and the rest (logging, checkpoints).",
            lambda: figures.time_bars(rows),
        ),
        (
            "throughput_over_time",
            "Throughput along the training",
            "Warm-up and any slow-down are seen here; the first part counts as warm-up.",
            lambda: figures.throughput_over_time(arms),
        ),
        (
            "batches",
            "Batch size and tokens per step",
            "A fixed batch keeps the samples constant and lets the tokens vary; a token budget the opposite.",
            lambda: figures.batches_over_time(arms),
        ),
        (
            "padding",
            "Padding",
            "Tokens computed only because samples of a batch differ in length.",
            lambda: figures.padding_bars(rows, facts),
        ),
        (
            "lengths",
            "Lengths and grouping",
            "The more lengths vary, the more a batching method that looks at lengths can gain.",
            lambda: figures.lengths_and_grouping(lengths, arms),
        ),
        (
            "valloss_by_source",
            "Validation loss per source",
            "Mean over the samples of each source; the untrained model is left out, its loss is far higher.",
            lambda: quality_figures.valloss_by_source(rows, names),
        ),
        (
            "valloss_difference",
            "Validation loss: paired differences",
            "Same samples in both arms. Intervals per source hold for all sources together (Bonferroni).",
            lambda: quality_figures.valloss_difference(comparison["differences"], names),
        ),
        (
            "mmmu_by_category",
            "MMMU-MC per category",
            "Wilson intervals; overlapping intervals of paired results are no test, the table above has it.",
            lambda: quality_figures.mmmu_by_category(rows, names, comparison["level"]),
        ),
    )
    drawn = []
    with plt.rc_context(RC):
        for name, title, caption, function in plan:
            figure = function()
            if figure is None:
                for suffix in (".png", ".svg"):  # a figure of an earlier state must not pass for one of this
                    (folder / f"{name}{suffix}").unlink(missing_ok=True)
                logger.info("figure %s left out: its data is missing", name)
                continue
            svg = save(figure, folder, name, title)
            drawn.append({"name": name, "title": title, "caption": caption, "svg": svg})
    return drawn
