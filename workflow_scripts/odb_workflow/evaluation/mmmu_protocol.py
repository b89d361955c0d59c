"""How one MMMU row becomes a prompt, and which letters may answer it.

Two protocols, each with results of its own, never mixed in one table:

``MMMU-MC-choice-likelihood-v1``
    The published one. Every image that is there, ``image_1`` to ``image_7`` in column order, before the text;
    the text is the question as it is, one line ``(A) option`` each, then ``Answer with the option letter
    only.``
``MMMU-MC-choice-likelihood-inline-v1``
    The same text, with each image entering where, and as often as, it is named; an image never named is not
    shown.

Both score the next-token log-probability of a letter, so the number is not comparable with leaderboards of
generated answers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .mmmu_subjects import category_of

LETTERS = "ABCDEFGH"
PROMPT_SUFFIX = "Answer with the option letter only."
IMAGE_COLUMNS = tuple(f"image_{number}" for number in range(1, 8))
IMAGES_FIRST = "MMMU-MC-choice-likelihood-v1"
IMAGES_INLINE = "MMMU-MC-choice-likelihood-inline-v1"
PROTOCOLS = {"v1": IMAGES_FIRST, "inline": IMAGES_INLINE}

OPTIONS_VALID = "options_valid"
OPTIONS_MISSING = "missing_options_scored_all_letters"
OPTIONS_TOO_MANY = "too_many_options_scored_AH"
ANSWER_OUTSIDE = "answer_outside_options_scored_all_letters"
NON_LETTER_ANSWER = "non_letter_answer"

_REFERENCE = re.compile(r"<image\s*(\d+)>")


class RowError(Exception):
    """A row that no protocol can score as it stands: its id, a reason in one word, and what is wrong."""

    def __init__(self, sample_id: str, reason: str, detail: str) -> None:
        self.sample_id, self.reason, self.detail = sample_id, reason, detail
        super().__init__(f"{sample_id}: {detail}")


@dataclass(frozen=True)
class Segment:
    """A piece of the user turn: text, or the image of a column (1 to 7)."""

    text: str | None = None
    image: int | None = None


@dataclass(frozen=True)
class Question:
    """A row ready to be scored.

    Attributes:
        question: The question as the row holds it.
        text: Question, options and instruction.
        segments: The user turn, in order.
        valid_letters: The letters among which the best wins.
        missing_images: Numbers that the text names and the row does not hold; reported, not fatal, under v1.
    """

    sample_id: str
    subject: str
    category: str
    question: str
    text: str
    options: tuple[str, ...]
    answer: str
    valid_letters: str
    option_status: str
    segments: tuple[Segment, ...]
    missing_images: tuple[int, ...] = ()

    @property
    def images(self) -> tuple[int, ...]:
        """Columns of the images in prompt order, 1-based; a column can come twice."""
        return tuple(segment.image for segment in self.segments if segment.image is not None)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation for ``processor.apply_chat_template``: one user turn."""
        content = [
            {"type": "image"} if segment.image is not None else {"type": "text", "text": segment.text}
            for segment in self.segments
        ]
        return [{"role": "user", "content": content}]


@dataclass(frozen=True)
class Excluded:
    """A row that is counted but not scored."""

    sample_id: str
    subject: str
    reason: str
    answer_raw: str
    detail: str = ""


def parse_options(value: Any, sample_id: str) -> tuple[str, ...]:
    """The options of a row: a list, or the text of a Python list literal. Nothing is ever executed.

    Every entry keeps its place, so that the n-th option has the n-th letter.

    Raises:
        RowError: the text is no literal list.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        if not value.strip():
            return ()
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise RowError(
                sample_id, "options_not_a_literal_list", f"options are not a literal list: {_short(value)}"
            ) from None
    if not isinstance(value, (list, tuple)):
        raise RowError(sample_id, "options_not_a_literal_list", f"options are not a list: {_short(value)}")
    return tuple(str(option).strip() for option in value)


def normalize_answer(value: Any) -> str:
    """The answer as the protocol compares it: stripped, upper case."""
    return "" if value is None else str(value).strip().upper()


def valid_letters(options: tuple[str, ...], answer: str) -> tuple[str, str]:
    """Which letters compete, and the status recorded for the row (published rules of protocol v1)."""
    if not options:
        return LETTERS, OPTIONS_MISSING
    if len(options) > len(LETTERS):
        return LETTERS, OPTIONS_TOO_MANY
    if LETTERS.index(answer) >= len(options):
        return LETTERS, ANSWER_OUTSIDE
    return LETTERS[: len(options)], OPTIONS_VALID


def prompt_text(question: str, options: tuple[str, ...]) -> str:
    """The text of the user turn: question, one line per option, the instruction."""
    lines = [f"({chr(ord('A') + place)}) {option}" for place, option in enumerate(options)]
    return "\n".join([question, *lines, PROMPT_SUFFIX])


def build_question(
    row: Mapping[str, Any], *, sample_id: str, subject: str, present: tuple[int, ...], protocol: str
) -> Question | Excluded:
    """Apply a protocol to one row.

    Args:
        row: The text columns: ``question``, ``options``, ``answer``.
        sample_id: Named in every message and result.
        present: Numbers (1 to 7) of the image columns that hold an image, ascending.
        protocol: One of ``PROTOCOLS.values()``.

    Returns:
        The question, or why it is not scored: an answer that is no single letter A-H.

    Raises:
        RowError: the options cannot be read; under the inline protocol also an image that is named and
            missing, or an answer outside the options.
    """
    answer = normalize_answer(row.get("answer"))
    if len(answer) != 1 or answer not in LETTERS:
        return Excluded(sample_id, subject, NON_LETTER_ANSWER, str(row.get("answer")))
    options = parse_options(row.get("options"), sample_id)
    letters, status = valid_letters(options, answer)
    asked = "" if row.get("question") is None else str(row["question"])
    text = prompt_text(asked, options)
    named = [int(number) for number in _REFERENCE.findall(text)]
    missing = tuple(sorted({number for number in named if number not in present}))
    if protocol == IMAGES_FIRST:
        segments = (*(Segment(image=number) for number in present), Segment(text=text))
    elif protocol == IMAGES_INLINE:
        if missing:
            numbers = ", ".join(f"<image {number}>" for number in missing)
            raise RowError(sample_id, "named_image_missing", f"names {numbers}, which the row does not hold")
        if status == ANSWER_OUTSIDE:
            raise RowError(
                sample_id, "answer_outside_options", f"answer {answer} with {len(options)} options only"
            )
        segments = _inline_segments(text)
    else:
        raise ValueError(f"unknown protocol {protocol!r}")
    return Question(
        sample_id=sample_id,
        subject=subject,
        category=category_of(subject),
        question=asked,
        text=text,
        options=options,
        answer=answer,
        valid_letters=letters,
        option_status=status,
        segments=segments,
        missing_images=missing,
    )


def _inline_segments(text: str) -> tuple[Segment, ...]:
    """Cut the text at each ``<image N>``; the images take the places of their names."""
    segments, start = [], 0
    for match in _REFERENCE.finditer(text):
        if match.start() > start:
            segments.append(Segment(text=text[start : match.start()]))
        segments.append(Segment(image=int(match.group(1))))
        start = match.end()
    if start < len(text):
        segments.append(Segment(text=text[start:]))
    return tuple(segments)


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
