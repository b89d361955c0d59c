"""Composed scenes: easy-VQA pictures in a grid, with long descriptions and conversations about them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .draw import Draw
from .easyvqa import COLORS, SHAPES, Tile, pixels, tiles
from .record import Item, Picture

ORDINALS = ("first", "second", "third", "fourth", "fifth")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DESCRIBE = (
    "Describe this picture in detail.",
    "Write a long description of the picture.",
    "What can be seen in this picture? Describe every part of it.",
)


class Scene:
    """A grid of tiles and what can be said about it."""

    def __init__(self, draw: Draw, max_rows: int, max_columns: int) -> None:
        rows, columns = draw.between(1, max_rows), draw.between(2, max_columns)
        self.grid: list[list[Tile]] = [[draw.pick(tiles()) for _ in range(columns)] for _ in range(rows)]

    @property
    def all_tiles(self) -> list[Tile]:
        return [tile for row in self.grid for tile in row]

    def pixels(self) -> np.ndarray:
        """uint8 ``[64 * rows, 64 * columns, 3]``."""
        return np.concatenate(
            [np.concatenate([pixels(tile.image_id) for tile in row], axis=1) for row in self.grid], axis=0
        )

    def summary(self) -> str:
        rows, columns = len(self.grid), len(self.grid[0])
        if rows == 1:
            return f"The picture is a row of {number(columns)} tiles, each with one shape."
        return (
            f"The picture is a grid of {number(rows)} rows and {number(columns)} columns, one shape a tile."
        )

    def row_sentence(self, index: int) -> str:
        shapes = join([f"a {tile.color} {tile.shape}" for tile in self.grid[index]])
        return f"The {ORDINALS[index]} row shows, from left to right, {shapes}."

    def tile_sentences(self, index: int) -> list[str]:
        """One sentence a tile: size, color, shape, place, and its right neighbor."""
        row, sentences = self.grid[index], []
        for column, tile in enumerate(row):
            text = f"In the {ORDINALS[column]} tile there is a {tile.size} {tile.color} {tile.shape}"
            text += f" near the {tile.place} of its tile" if tile.place != "center" else " in the center"
            if column + 1 < len(row):
                text += f", and a {row[column + 1].color} {row[column + 1].shape} follows to its right"
            sentences.append(text + ".")
        return sentences

    def counts(self) -> list[str]:
        shapes = Counter(tile.shape for tile in self.all_tiles)
        colors = Counter(tile.color for tile in self.all_tiles)
        sentences = [
            f"There {be(shapes[name])} {plural(shapes[name], name)}." for name in SHAPES if shapes[name]
        ]
        sentences.append("The colors are " + join([name for name in COLORS if colors[name]]) + ".")
        repeated = [name for name in COLORS if colors[name] > 1]
        if repeated:
            sentences.append("More than one shape is " + join(repeated, "or") + ".")
        return sentences

    def description(self, detail: int) -> str:
        """Text that grows with ``detail``: 1 names the shapes, 2 adds counts, 3 adds every tile."""
        parts = [self.summary()]
        for index in range(len(self.grid)):
            parts.append(self.row_sentence(index))
            if detail >= 3:
                parts.extend(self.tile_sentences(index))
        if detail >= 2:
            parts.extend(self.counts())
        return " ".join(parts)


def image_textualization(draw: Draw, number_: int) -> Item:
    """One scene, one long description."""
    scene = Scene(draw, 4, 4)
    return Item(
        [f"<image>\n{draw.pick(DESCRIBE)}", scene.description(draw.between(2, 3))],
        [Picture(f"images/image_textualization/{number_:06d}.png", scene.pixels())],
        {"dataset": "easy-vqa, composed", "images": [tile.image_id for tile in scene.all_tiles]},
    )


def sharegpt4o(draw: Draw, number_: int) -> Item:
    """A conversation of several turns about one or two scenes; every fifth is about text only."""
    if draw.chance(0.2):
        return _text_only(draw)
    scenes = [Scene(draw, 3, 5) for _ in range(2 if draw.chance(0.25) else 1)]
    scene = scenes[0]
    names = (
        ["the picture"]
        if len(scenes) == 1
        else [f"the {ORDINALS[index]} picture" for index in range(len(scenes))]
    )
    turns = ["<image>\n" * len(scenes) + f"Describe {join(names)}.", scene.description(draw.between(1, 3))]
    for other in scenes[1:]:
        turns[1] += " In the second picture: " + other.description(1)
    for _ in range(draw.between(1, 4)):
        turns.extend(_question(draw, scene, names[0]))
    return Item(
        turns,
        [
            Picture(f"images/sharegpt4o/{number_:06d}-{index}.png", each.pixels())
            for index, each in enumerate(scenes)
        ],
        {
            "dataset": "easy-vqa, composed",
            "images": [[tile.image_id for tile in each.all_tiles] for each in scenes],
        },
    )


def _question(draw: Draw, scene: Scene, name: str) -> tuple[str, str]:
    """A question about the scene and its answer."""
    kind = draw.below(4)
    if kind == 0:
        shape = draw.pick(SHAPES)
        count = sum(tile.shape == shape for tile in scene.all_tiles)
        return f"How many {shape}s are in {name}?", f"There {be(count)} {plural(count, shape)} in {name}."
    if kind == 1:
        color = draw.pick(COLORS)
        found = [f"a {tile.shape}" for tile in scene.all_tiles if tile.color == color]
        return (
            f"Which shapes in {name} are {color}?",
            f"The {color} shapes are {join(found)}." if found else f"No shape in {name} is {color}.",
        )
    row = draw.below(len(scene.grid))
    if kind == 2:
        column = draw.below(len(scene.grid[row]))
        tile = scene.grid[row][column]
        return (
            f"What is in the {ORDINALS[column]} tile of the {ORDINALS[row]} row?",
            f"It is a {tile.size} {tile.color} {tile.shape}.",
        )
    return f"Describe the {ORDINALS[row]} row again.", " ".join(scene.tile_sentences(row))


def _text_only(draw: Draw) -> Item:
    """Turns without a picture: repeat, count and sort the colors and shapes of a list."""
    words = [f"{draw.pick(COLORS)} {draw.pick(SHAPES)}" for _ in range(draw.between(3, 9))]
    turns = [
        f"Remember this list: {', '.join(words)}.",
        f"The list has {number(len(words))} entries: {join(words)}.",
    ]
    for _ in range(draw.between(1, 3)):
        shape = draw.pick(SHAPES)
        found = [word for word in words if word.endswith(shape)]
        answer = f"{number(len(found)).capitalize()}: {join(found)}." if found else "None of them."
        turns += [f"Which entries are {shape}s?", answer]
    turns += ["Sort the list by the alphabet.", ", ".join(sorted(words)) + "."]
    return Item(turns, [], {"dataset": "composed text"})


def number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def be(count: int) -> str:
    return "is" if count == 1 else "are"


def plural(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def join(parts: list[str], word: str = "and") -> str:
    """``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {word} {parts[-1]}"
