"""easy-VQA's train part: pictures of one colored shape with questions; the test part is never read here."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import easy_vqa
import numpy as np
from PIL import Image

from .draw import Draw
from .record import Item, Picture, Pixels

COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SHAPES = ("circle", "rectangle", "triangle")
LETTERS = "ABCDEFGH"
MC_INSTRUCTION = "Answer with the option letter only."
SHARE_WITH_VALUE = 0.6  # of the questions drawn, the share that asks for a color or a shape


@dataclass(frozen=True)
class Question:
    """One question of easy-VQA with its answer; ``index`` is its place in the package's list."""

    index: int
    image_id: int
    text: str
    answer: str

    @property
    def choices(self) -> tuple[str, ...]:
        """All answers of the same kind."""
        return next(kind for kind in (COLORS, SHAPES, ("no", "yes")) if self.answer in kind)


@functools.cache
def questions() -> tuple[Question, ...]:
    """Every question of the train part, in the package's order."""
    texts, answers, image_ids = easy_vqa.get_train_questions()
    return tuple(
        Question(index, image_id, text, answer)
        for index, (text, answer, image_id) in enumerate(zip(texts, answers, image_ids, strict=True))
    )


@functools.cache
def image_files() -> dict[int, Path]:
    """Image id -> PNG file of the package."""
    return {number: Path(name) for number, name in easy_vqa.get_train_image_paths().items()}


@dataclass(frozen=True)
class Tile:
    """What a picture shows: shape and color from its questions, place and size from its pixels."""

    image_id: int
    shape: str
    color: str

    @property
    def place(self) -> str:
        """Where the shape lies in its tile, for example ``upper left``."""
        return _place_and_size(self.image_id)[0]

    @property
    def size(self) -> str:
        """``small``, ``medium`` or ``large``."""
        return _place_and_size(self.image_id)[1]


@functools.cache
def tiles() -> tuple[Tile, ...]:
    """The pictures whose shape and color the questions tell, by image id."""
    known: dict[int, dict[str, str]] = defaultdict(dict)
    for question in questions():
        facts = known[question.image_id]
        if question.answer in COLORS:
            facts["color"] = question.answer
        elif question.answer in SHAPES:
            facts["shape"] = question.answer
        elif (question.answer == "yes") != bool(re.search(r"\b(not|no)\b", question.text)):
            for kind, words in (("color", COLORS), ("shape", SHAPES)):
                for word in words:
                    if re.search(rf"\b{word}\b", question.text):
                        facts[kind] = word
    return tuple(
        Tile(number, facts["shape"], facts["color"])
        for number, facts in sorted(known.items())
        if len(facts) == 2
    )


@functools.cache
def pixels(image_id: int) -> Pixels:
    """The picture as uint8 ``[64, 64, 3]``."""
    with Image.open(image_files()[image_id]) as image:
        return np.asarray(image.convert("RGB"))


@functools.cache
def _place_and_size(image_id: int) -> tuple[str, str]:
    """Where the shape lies in its tile and how large it is; the commonest color is the background."""
    image = pixels(image_id)
    codes = image.astype(np.int64) @ np.array([65536, 256, 1])
    values, counts = np.unique(codes, return_counts=True)
    rows, columns = np.nonzero(codes != values[counts.argmax()])
    height, width = image.shape[:2]
    row, column = (rows.min() + rows.max()) / 2 / height, (columns.min() + columns.max()) / 2 / width
    vertical = "upper" if row < 0.4 else "lower" if row > 0.6 else "middle"
    horizontal = "left" if column < 0.4 else "right" if column > 0.6 else "center"
    place = "center" if (vertical, horizontal) == ("middle", "center") else f"{vertical} {horizontal}"
    share = rows.size / (height * width)
    return place, "small" if share < 0.05 else "large" if share > 0.12 else "medium"


def picture(image_id: int) -> Picture:
    """The package's own file; every record about it shares one copy."""
    return Picture(f"images/easy_vqa/{image_id:04d}.png", file=image_files()[image_id])


def draw_question(draw: Draw) -> Question:
    """A question; more often about a color or a shape than easy-VQA's own mix (a quarter) would give."""
    wanted = draw.chance(SHARE_WITH_VALUE)
    while True:
        question = draw.pick(questions())
        if (question.answer not in ("yes", "no")) == wanted:
            return question


def options_for(question: Question, draw: Draw) -> list[str]:
    """Options in alphabetical order: all shapes, no and yes, or one color of each quarter of the palette.

    So the letter follows from the answer alone. A model of 2 layers learns that within some hundred steps;
    finding the letter of an option that stands anywhere takes it thousands.
    """
    if question.answer not in COLORS:
        return list(question.choices)
    quarters = [COLORS[start : start + 2] for start in range(0, len(COLORS), 2)]
    return [question.answer if question.answer in quarter else draw.pick(quarter) for quarter in quarters]


def with_image(draw: Draw, text: str) -> str:
    """The placeholder before the text, with and without a line break: both occur in published data."""
    return f"<image>\n{text}" if draw.chance(0.5) else f"<image>{text}"


def named_image(draw: Draw, text: str) -> str:
    """The same, and in a third of the cases the text names its picture as MMMU's questions do."""
    return f"<image><image 1> {text}" if draw.chance(1 / 3) else with_image(draw, text)


def choice_prompt(text: str, options: list[str]) -> str:
    """Question, one ``(A) option`` line each, instruction: the layout of MMMU-MC-choice-likelihood-v1."""
    lines = [f"({letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([text, *lines, MC_INSTRUCTION])


def vqa_like(draw: Draw) -> Item:
    """One picture, one question, a short answer."""
    question = draw_question(draw)
    return Item(
        [with_image(draw, question.text), question.answer],
        [picture(question.image_id)],
        {"dataset": "easy-vqa", "part": "train", "image": question.image_id, "question": question.index},
    )


def aokvqa(draw: Draw) -> Item:
    """One picture, one question as multiple choice, answered by the option's letter."""
    question = draw_question(draw)
    options = options_for(question, draw)
    return Item(
        [named_image(draw, choice_prompt(question.text, options)), LETTERS[options.index(question.answer)]],
        [picture(question.image_id)],
        {"dataset": "easy-vqa", "part": "train", "image": question.image_id, "question": question.index},
    )
