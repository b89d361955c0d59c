"""Figures of odd inputs: one step, no numbers, one arm, many arms. Nothing may fail or mislead."""

from __future__ import annotations

from pathlib import Path

import comparison_results as made
import numpy as np
import pandas as pd
import pytest
from odb_workflow.comparison import figures, quality_figures
from odb_workflow.comparison.analysis import analyze
from odb_workflow.comparison.collect import ArmResult, RunResult, collect_arm
from odb_workflow.comparison.draw import draw_all
from odb_workflow.comparison.page import render
from odb_workflow.comparison.style import ARM_COLORS, arm_styles


def analyzed(arms: list[ArmResult], reference: str, repository: Path) -> dict:
    """comparison.json's content for ``arms``."""
    return analyze(
        arms, run="x", reference=reference, scripts=repository / "workflow_scripts", study_command="study",
        reproduce_command="again",
    )  # fmt: skip


def test_thinning_keeps_the_mean() -> None:
    values = np.arange(1000, dtype=float)
    thin = figures.thin(values, points=50)
    assert len(thin) == 50 and thin.mean() == pytest.approx(values.mean())
    assert figures.thin(np.array([1.0, 3.0]), np.array([3.0, 1.0]), points=1).tolist() == [1.5]
    assert len(figures.thin(np.array([1.0, 2.0]))) == 2


def test_styles_are_distinct_and_stable() -> None:
    names = [f"arm{i}" for i in range(9)]
    styles = arm_styles(names)
    assert len({style.color for style in list(styles.values())[:7]}) == 7
    assert styles["arm0"].color == ARM_COLORS[0] == styles["arm7"].color
    assert len({(style.marker, style.hatch) for style in list(styles.values())[:7]}) == 7, (
        "told apart in print"
    )


def test_colors_can_be_told_apart_by_color_blind_readers() -> None:
    """Neighbors of the palette differ in lightness or in blue against yellow, which every reader sees."""

    def seen(color: str) -> np.ndarray:
        red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        lightness = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        return np.array([lightness, (blue - (red + green) / 2) / 2])

    first = [seen(color) for color in ARM_COLORS[:4]]
    for i, one in enumerate(first):
        for other in first[i + 1 :]:
            assert np.abs(one - other).max() > 0.08


def test_no_data_draws_nothing() -> None:
    empty = [ArmResult("odb", [RunResult("odb", None, Path("none"))])]
    assert figures.loss_curve(empty, "samples") is None
    assert figures.throughput_over_time(empty) is None
    assert figures.batches_over_time(empty) is None
    assert figures.lengths_and_grouping(None, empty) is None
    assert figures.throughput_bars([]) is None and figures.time_bars([]) is None
    assert quality_figures.valloss_by_source([], []) is None
    assert quality_figures.valloss_difference([], []) is None
    assert quality_figures.mmmu_by_category([], [], 0.95) is None
    assert quality_figures.quality_plane([]) is None


def test_one_step_and_missing_losses(repository: Path, tmp_path: Path) -> None:
    """A run of a single step whose loss is missing still has its other figures, and a page."""
    made.write_training(tmp_path / "run" / "odb", "odb", loader="odb", batch=None, speed=9000)
    log = tmp_path / "run" / "odb" / "step_log.jsonl"
    log.write_text(log.read_text().splitlines()[0].replace('"loss": ', '"loss": null, "was": ') + "\n")
    arms = [collect_arm(tmp_path / "run", name) for name in ("odb", "standard")]
    comparison = analyzed(arms, "standard", repository)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "loss_by_time.png").write_bytes(b"from an earlier state")
    drawn = draw_all(comparison, arms, None, tmp_path / "figures")
    names = {item["name"] for item in drawn}
    assert "loss_by_samples" not in names and {"padding", "time", "batches", "lengths"} <= names
    assert not (tmp_path / "figures" / "loss_by_time.png").exists(), "no stale figure stays"
    assert "no interval" in render(comparison, drawn, config_text="") or comparison["differences"] == []


def test_several_seeds_on_the_page(repository: Path, tmp_path: Path) -> None:
    """Means, intervals over seeds, and the sentence that says so."""
    for arm, batch in (("odb", None), ("standard", 8)):
        for seed in (1, 2):
            folder = tmp_path / "run" / arm / f"seed-{seed}"
            made.write_training(folder, arm, loader=arm, batch=batch, speed=9000, seed=seed)
            made.write_evaluations(folder, loss=1.2, accuracy=0.5, seed=seed + 10 * bool(batch))
    arms = [collect_arm(tmp_path / "run", name, [1, 2]) for name in ("odb", "standard")]
    comparison = analyzed(arms, "standard", repository)
    text = " ".join(render(comparison, [], config_text="").split())
    assert comparison["answers"][0]["sure"].endswith("2 training seeds per arm")
    assert "Means over seeds" in text and "one training seed per arm" not in text
    assert "over seeds" in comparison["answers"][0]["faster"]
    row = comparison["arms"][0]
    assert (
        row["intervals"]["train_loss"][0] < row["metrics"]["train_loss"] < row["intervals"]["train_loss"][1]
    )


def test_lengths_of_one_size(tmp_path: Path) -> None:
    """All records equally long: no division by zero, no empty axis."""
    lengths = pd.DataFrame({"source": "a", "length": [40] * 10})
    figure = figures.lengths_and_grouping(lengths, [])
    assert figure is not None
    figure.savefig(tmp_path / "x.png")


def test_intervals_say_their_level_and_their_n(repository: Path, tmp_path: Path) -> None:
    root = made.write_run(tmp_path / "demo")
    arms = [collect_arm(root, name) for name in ("odb", "standard")]
    content = analyzed(arms, "standard", repository)
    names = [arm.name for arm in arms]
    categories = quality_figures.mmmu_by_category(content["arms"], names, 0.9)
    assert "90 % interval" in all_texts(categories)
    difference = quality_figures.valloss_difference(content["differences"], names)
    paired = content["differences"][0]["validation_loss"]
    counts = {"all samples": paired["mean"]["n"], **{s["source"]: s["n"] for s in paired["per_source"]}}
    for name, count in counts.items():
        assert f"{name} (n={count:,})" in all_texts(difference)


def all_texts(figure: object) -> str:
    """Every text of a figure, one a line."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))
