"""HTML pages of the data: one file each, no network, light and dark."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from PIL import Image

_FOLDER = Path(__file__).parent / "pages"
_WIDTH, _HEIGHT, _BASE = 720, 190, 24

NOTES = {
    "cmyk": "CMYK image converted to RGB",
    "cut_to_max_length": "text cut off at max_length",
    "empty_question": "human turn without text and image",
    "exif_orientation": "image turned by its EXIF orientation",
    "first_frame_of_several": "first frame of an animated or multi-page image",
    "float_scaled": "float image scaled to 8 bit",
    "high_bit_depth_scaled": "image of more than 8 bit scaled by its value range",
    "transparency_flattened": "transparency flattened on white",
}


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return "missing" if value is None else f"{value:,.0f}"


def number(value: float | None, digits: int = 1) -> str:
    """A number with a fixed number of decimals."""
    return "missing" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent with one decimal."""
    return "missing" if value is None else f"{100 * value:.1f} %"


def spark(counts: Sequence[int]) -> Markup:
    """A small histogram for a table cell."""
    top = max(max(counts, default=0), 1)
    rects = "".join(
        f'<rect x="{4 * i}" y="{24 - 24 * value / top:.1f}" width="3.4" height="{24 * value / top:.1f}"/>'
        for i, value in enumerate(counts)
        if value
    )
    label = "records by length"
    return Markup(
        f'<svg class="spark" viewBox="0 0 {4 * len(counts)} 24" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{rects}</svg>'
    )


def bars(counts: Sequence[int], edges: Sequence[float]) -> Markup:
    """A histogram with its axis; one bar per bin, all of equal width."""
    top, step = max(max(counts, default=0), 1), _WIDTH / max(len(counts), 1)
    room = _HEIGHT - _BASE - 14
    parts = []
    for i, value in enumerate(counts):
        height = room * value / top
        title = f"{edges[i]:,.0f} to {edges[i + 1]:,.0f} tokens: {value:,} records"
        parts.append(
            f'<rect x="{i * step + 1:.1f}" y="{_HEIGHT - _BASE - height:.1f}" width="{step - 2:.1f}" '
            f'height="{height:.1f}"><title>{title}</title></rect>'
        )
    every = max(len(counts) // 8, 1)
    for i in range(0, len(edges), every):
        x, anchor = i * step, "start" if i == 0 else "end" if i == len(edges) - 1 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{edges[i]:,.0f}</text>')
    parts.append(f'<text x="2" y="11">largest bin: {top:,} records</text>')
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="histogram of lengths in tokens">'
        f"{''.join(parts)}</svg>"
    )


def data_uri(picture: Image.Image) -> str:
    """A picture inside the page: PNG, or JPEG where that would be large."""
    buffer = io.BytesIO()
    small = picture.width * picture.height <= 65_536
    picture.save(buffer, "PNG" if small else "JPEG", **({} if small else {"quality": 88}))
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def render(template: str, **values: Any) -> str:
    """A page from ``pages/<template>``; text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"count": count, "number": number, "percent": percent, "spark": spark}
    environment.filters["data_uri"] = data_uri
    return environment.get_template(template).render(bars=bars, notes=NOTES, **values)


def data_report_page(report: dict[str, Any]) -> str:
    """The data report as HTML."""
    return render("data_report.html.j2", r=report)


def inspection_page(data: str, groups: list[tuple[str, list[Any]]], problems: list[str]) -> str:
    """The inspected samples, grouped by source, as HTML."""
    total = sum(len(inspections) for _, inspections in groups)
    return render("inspect.html.j2", data=data, groups=groups, problems=problems, total=total)
