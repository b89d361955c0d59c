"""Simple Chinese characters as straight strokes on a 16 x 16 grid; no font is needed to draw them."""

from __future__ import annotations

import numpy as np

GRID = 16
Stroke = tuple[int, int, int, int]  # x0, y0, x1, y1


def _box(left: int, top: int, right: int, bottom: int) -> tuple[Stroke, ...]:
    return (
        (left, top, right, top),
        (right, top, right, bottom),
        (right, bottom, left, bottom),
        (left, bottom, left, top),
    )


_TREE = ((1, 5, 14, 5), (7, 1, 7, 14), (7, 5, 2, 12), (7, 5, 12, 12))

CHARACTERS: dict[str, tuple[Stroke, ...]] = {
    "\u4e00": ((1, 7, 14, 7),),  # one
    "\u4e8c": ((3, 4, 12, 4), (1, 12, 14, 12)),  # two
    "\u4e09": ((2, 3, 13, 3), (3, 8, 12, 8), (1, 13, 14, 13)),  # three
    "\u5341": ((1, 7, 14, 7), (7, 1, 7, 14)),  # ten
    "\u571f": ((7, 2, 7, 13), (3, 6, 12, 6), (1, 13, 14, 13)),  # earth
    "\u58eb": ((7, 1, 7, 13), (1, 6, 14, 6), (4, 13, 11, 13)),  # scholar
    "\u5de5": ((2, 3, 13, 3), (7, 3, 7, 13), (1, 13, 14, 13)),  # work
    "\u738b": ((2, 3, 13, 3), (3, 8, 12, 8), (1, 13, 14, 13), (7, 3, 7, 13)),  # king
    "\u5e72": ((3, 3, 12, 3), (1, 8, 14, 8), (7, 3, 7, 14)),  # dry
    "\u4e0a": ((7, 1, 7, 13), (7, 6, 12, 6), (1, 13, 14, 13)),  # up
    "\u4e0b": ((1, 3, 14, 3), (7, 3, 7, 14), (7, 6, 12, 9)),  # down
    "\u6b63": ((2, 2, 13, 2), (7, 2, 7, 13), (7, 7, 12, 7), (4, 7, 4, 13), (1, 13, 14, 13)),  # right
    "\u53e3": _box(3, 3, 12, 12),  # mouth
    "\u65e5": (*_box(4, 1, 11, 14), (4, 7, 11, 7)),  # sun
    "\u76ee": (*_box(4, 1, 11, 14), (4, 5, 11, 5), (4, 10, 11, 10)),  # eye
    "\u7530": (*_box(2, 2, 13, 13), (2, 7, 13, 7), (7, 2, 7, 13)),  # field
    "\u767d": (*_box(4, 4, 11, 14), (4, 9, 11, 9), (8, 0, 6, 4)),  # white
    "\u65e6": (*_box(4, 1, 11, 10), (4, 5, 11, 5), (1, 14, 14, 14)),  # dawn
    "\u65e9": (*_box(4, 1, 11, 8), (4, 4, 11, 4), (1, 11, 14, 11), (7, 8, 7, 15)),  # early
    "\u4e2d": (*_box(2, 4, 13, 9), (7, 1, 7, 14)),  # middle
    "\u53e4": (*_box(4, 8, 11, 14), (1, 4, 14, 4), (7, 1, 7, 8)),  # old
    "\u77f3": (*_box(6, 8, 12, 14), (1, 2, 14, 2), (7, 2, 2, 10)),  # stone
    "\u5c71": ((2, 6, 2, 13), (7, 2, 7, 13), (13, 6, 13, 13), (2, 13, 13, 13)),  # mountain
    "\u51fa": (
        (7, 1, 7, 14),
        (3, 3, 3, 7),
        (3, 7, 12, 7),
        (12, 3, 12, 7),
        (1, 9, 1, 14),
        (1, 14, 13, 14),
        (13, 9, 13, 14),
    ),  # go out
    "\u4eba": ((7, 2, 2, 14), (7, 6, 13, 14)),  # person
    "\u516b": ((5, 3, 2, 13), (9, 3, 13, 13)),  # eight
    "\u5927": ((1, 5, 14, 5), (7, 1, 2, 14), (7, 5, 13, 14)),  # large
    "\u5929": ((2, 2, 13, 2), (1, 7, 14, 7), (7, 2, 2, 14), (7, 7, 13, 14)),  # sky
    "\u6728": _TREE,  # tree
    "\u672c": (*_TREE, (5, 11, 9, 11)),  # root
}


def draw_character(character: str) -> np.ndarray:
    """The character as a bool mask ``[16, 16]``, strokes two pixels wide."""
    mask = np.zeros((GRID, GRID), dtype=bool)
    for x0, y0, x1, y1 in CHARACTERS[character]:
        steps = max(abs(x1 - x0), abs(y1 - y0))
        for step in range(steps + 1):
            x = x0 + (2 * step * (x1 - x0) + steps) // (2 * steps)
            y = y0 + (2 * step * (y1 - y0) + steps) // (2 * steps)
            mask[y : y + 2, x : x + 2] = True
    return mask
