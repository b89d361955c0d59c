"""One record before it is written: texts, pictures as arrays or files, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Pixels = np.ndarray  # uint8 [height, width, 3]


@dataclass
class Picture:
    """A picture of a record.

    Args:
        name: Path relative to the TMDB; records that share a picture share the name.
        pixels: uint8 ``[height, width, 3]``, or None where ``file`` is given.
        file: An existing PNG that is copied as it is.
    """

    name: str
    pixels: Pixels | None = None
    file: Path | None = None


@dataclass
class Item:
    """A conversation with its pictures; turns alternate human, gpt, human, gpt ..."""

    turns: list[str]
    pictures: list[Picture] = field(default_factory=list)
    upstream: dict[str, Any] = field(default_factory=dict)
