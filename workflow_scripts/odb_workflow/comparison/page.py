"""The comparison as one HTML file: no network, figures inside, light and dark, sortable table."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from .claims import interval_text, p_text
from .metrics import METRICS, is_finite
from .rows import arm_words
from .text_tables import cell

TEMPLATE = "page.html.j2"
# Columns that the page shows only when asked.
MORE = (
    "samples_per_step",
    "emitted_samples",
    "eval_samples",
    "data_wait_share",
    "startup_seconds",
    "peak_memory_bytes",
)


def resolve(document: Any, path: str) -> Any:
    """The value at a dotted path (``arms.0.metrics.train_loss``) of nested dictionaries and lists."""
    for part in path.split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


class Numbers:
    """Shows numbers of ``comparison.json``; each element carries the path and the value it came from."""

    def __init__(self, comparison: dict[str, Any]) -> None:
        self.comparison = comparison

    def _tag(self, path: str, text: str) -> Markup:
        value = resolve(self.comparison, path)
        return Markup('<span class="num" data-path="{}" data-value="{}">{}</span>').format(
            path, json.dumps(value), text
        )

    def metric(self, row_index: int, key: str) -> Markup:
        """A metric of an arm's row."""
        row = self.comparison["arms"][row_index]
        metric = next(metric for metric in METRICS if metric.key == key)
        return self._tag(f"arms.{row_index}.metrics.{key}", cell(row, metric))

    def number(self, path: str, digits: int, scale: float = 1.0) -> Markup:
        """Any number of the comparison."""
        value = resolve(self.comparison, path)
        return self._tag(path, f"{value * scale:,.{digits}f}" if is_finite(value) else "missing")

    def signed(self, path: str, digits: int, scale: float = 1.0) -> Markup:
        """A difference, with its sign."""
        value = resolve(self.comparison, path)
        return self._tag(path, f"{value * scale:+,.{digits}f}" if is_finite(value) else "missing")

    def p_value(self, path: str) -> Markup:
        """A p-value, never shown as zero."""
        value = resolve(self.comparison, path)
        return self._tag(path, p_text(value) if is_finite(value) else "missing")

    def estimate(self, path: str, digits: int, scale: float = 1.0) -> Markup:
        """A stored estimate as ``value [low, high]``; each end carries its own path."""
        stored = resolve(self.comparison, path)
        if not stored or not is_finite(stored["value"]):
            return Markup("missing")
        value = self._tag(f"{path}.value", f"{stored['value'] * scale:.{digits}f}")
        if stored["low"] is None or stored["high"] is None:
            return Markup("{} [no interval]").format(value)
        ends = [self._tag(f"{path}.{end}", f"{stored[end] * scale:.{digits}f}") for end in ("low", "high")]
        return Markup("{} [{}, {}]").format(value, *ends)


def fact_text(value: Any) -> str:
    """A recorded setting or count as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def example_records(folder: Path | None) -> list[dict[str, Any]]:
    """Committed example records: file name, headline fields, and the whole text."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder and folder.is_dir() else ():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(record, dict):
            continue
        scalars = {k: v for k, v in record.items() if isinstance(v, (str, int, float)) and len(str(v)) < 200}
        found.append({"name": path.name, "fields": scalars, "text": json.dumps(record, indent=2)})
    return found


def render(
    comparison: dict[str, Any],
    figures: Sequence[dict[str, str]],
    *,
    config_text: str,
    examples: Sequence[dict[str, Any]] = (),
) -> str:
    """The page as text.

    Args:
        comparison: Content of ``comparison.json`` as read back from JSON: the page can show nothing else.
        figures: ``name``, ``title``, ``caption`` and inline ``svg`` of each figure.
        config_text: The merged config, as YAML.
        examples: From ``example_records``.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    facts = comparison["fairness"]
    keys = [key for key in facts["keys"] if not key.startswith("versions.")]
    versions = [key for key in facts["keys"] if key.startswith("versions.")]
    return environment.get_template(TEMPLATE).render(
        c=comparison,
        metrics=METRICS,
        more=MORE,
        arm_words=arm_words,
        fact_text=fact_text,
        p_text=p_text,
        show=Numbers(comparison),
        finite=is_finite,
        interval=interval_text,
        fact_keys=keys,
        version_keys=versions,
        figures=[
            {**figure, "svg": Markup(figure["svg"]), "alt": html.escape(figure["title"])}
            for figure in figures
        ],
        config_text=config_text,
        examples=examples,
    )
