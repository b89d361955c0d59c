"""The mixture: which sources, how many records of each, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from . import digits, easyvqa, scenes, text_lines
from .draw import Draw
from .record import Item

SOURCES: dict[str, Callable[[Draw, int], Item]] = {
    "aokvqa": lambda draw, _: easyvqa.aokvqa(draw),
    "chinese_text_recognition": text_lines.chinese_text_recognition,
    "iiit5k": text_lines.iiit5k,
    "image_textualization": scenes.image_textualization,
    "orand_car_a": digits.orand_car_a,
    "sharegpt4o": scenes.sharegpt4o,
    "vqa_like": lambda draw, _: easyvqa.vqa_like(draw),
}
DEFAULT_SIZES = {
    "aokvqa": 1500,
    "chinese_text_recognition": 80,
    "iiit5k": 140,
    "image_textualization": 100,
    "orand_car_a": 140,
    "sharegpt4o": 80,
    "vqa_like": 1960,
}


def scaled_sizes(total: int) -> dict[str, int]:
    """The default proportions at another total; every source keeps at least one record."""
    whole = sum(DEFAULT_SIZES.values())
    sizes = {name: max(1, total * count // whole) for name, count in DEFAULT_SIZES.items()}
    sizes["vqa_like"] = max(1, sizes["vqa_like"] + total - sum(sizes.values()))
    return sizes


def items(sizes: Mapping[str, int], seed: int) -> Iterator[tuple[str, int, Item]]:
    """Yield (source, number within the source, item) in mixed order.

    A record depends on the seed, its source and its number alone, so that changing one source's size leaves
    the records of the others as they were.
    """
    order = [(name, number) for name in SOURCES for number in range(sizes.get(name, 0))]
    Draw(seed, "order").shuffle(order)
    for name, number in order:
        yield name, number, SOURCES[name](Draw(seed, name, number), number)
