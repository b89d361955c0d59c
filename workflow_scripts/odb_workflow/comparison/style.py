"""Look of the figures: colors for color-blind readers, markers and hatches for print, light and dark by CSS.

A figure is drawn once. Its PNG has the light colors; in its SVG every ink color is replaced by a CSS variable
with the light color as fall-back, so that the page can show it on a dark ground.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, SOFT, GRID, PAPER = "#1b1f24", "#59626d", "#d9dde2", "#fefefe"
# Okabe and Ito's palette without yellow, which is unreadable on white; order by contrast with each other.
ARM_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")

_VARIABLES = {INK: "ink", SOFT: "soft", GRID: "grid", PAPER: "paper"}
_VARIABLES.update({color: f"arm-{index}" for index, color in enumerate(ARM_COLORS)})

RC = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
}


@dataclass(frozen=True)
class ArmStyle:
    """Color, marker, line and hatch of one arm, the same in every figure."""

    color: str
    marker: str
    line: Any
    hatch: str


def arm_styles(names: Sequence[str]) -> dict[str, ArmStyle]:
    """A style per arm, by position; beyond seven arms the styles repeat."""
    return {
        name: ArmStyle(
            ARM_COLORS[i % len(ARM_COLORS)],
            MARKERS[i % len(MARKERS)],
            LINES[i % len(LINES)],
            HATCHES[i % len(HATCHES)],
        )
        for i, name in enumerate(names)
    }


def new_figure(rows: int = 1, columns: int = 1, *, width: float = 5.2, height: float = 3.3) -> Any:
    """A figure with its axes in this style (a single axes, or a flat list of them)."""
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained")
    flat = list(axes.flat) if rows * columns > 1 else [axes]
    return (figure, flat[0]) if len(flat) == 1 else (figure, flat)


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend of ``axes`` under the figure, in as many columns as fit its width."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 4 if sum(len(label) + 5 for label in labels[:4]) <= 48 else 3
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=9, columnspacing=1.2,
        handletextpad=0.5, markerscale=1.2,
    )  # fmt: skip


def figure_title(figure: Figure, text: str) -> None:
    """A title from the figure's left edge, for axes with long labels where the axes' own would not fit."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=RC["axes.titlesize"], fontweight="bold")


def themed_svg(text: str, name: str) -> str:
    """An SVG document as an inline element: own ids, CSS variables for the colors, no fixed size.

    Args:
        text: SVG as matplotlib writes it.
        name: Prefix that keeps the ids of several figures in one page apart.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    for color, variable in _VARIABLES.items():
        text = re.sub(rf"(fill|stroke|stop-color): {color}\b", rf"\1: var(--{variable}, {color})", text)
        # Hatch patterns carry colors as attributes.
        text = re.sub(rf'\b(fill|stroke)="{color}"', rf'style="\1: var(--{variable}, {color})"', text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f"{head}>{rest}"


def save(figure: Figure, folder: Path, name: str, title: str) -> str:
    """Write ``name.png`` and ``name.svg`` into ``folder`` and return the inline SVG for the page."""
    buffer = io.StringIO()
    with plt.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None, "Title": title})
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    plt.close(figure)
    text = buffer.getvalue()
    (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    return themed_svg(text, name)
