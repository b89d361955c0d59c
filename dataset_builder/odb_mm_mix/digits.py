"""Number strings of handwritten digits: scikit-learn's 8x8 digits side by side."""

from __future__ import annotations

import functools

import numpy as np

from .draw import Draw
from .record import Item, Picture

SCALE = 4
PROMPTS = (
    "What number is written here?",
    "Read the handwritten number.",
    "Which digits does the picture show?",
)


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images, bunch.target


def orand_car_a(draw: Draw, number: int) -> Item:
    """A string of 2 to 8 digits, dark on paper color, 32 pixels high."""
    images, targets = _digits()
    chosen = [draw.below(len(targets)) for _ in range(draw.between(2, 8))]
    ink = np.concatenate([images[index] for index in chosen], axis=1).repeat(SCALE, 0).repeat(SCALE, 1) / 16.0
    paper = np.array([draw.between(225, 255), draw.between(225, 255), draw.between(210, 245)])
    color = np.array([draw.between(0, 90), draw.between(0, 60), draw.between(0, 110)])
    pixels = np.rint(paper + (color - paper) * ink[..., None]).astype(np.uint8)
    answer = "".join(str(targets[index]) for index in chosen)
    return Item(
        [f"<image>\n{draw.pick(PROMPTS)}", answer],
        [Picture(f"images/orand_car_a/{number:06d}.png", pixels)],
        {"dataset": "scikit-learn digits", "digits": chosen},
    )
