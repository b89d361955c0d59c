"""Rows of published data sets as TMDB conversations.

Known forms: LLaVA (``conversations: [{from, value}]``), OpenAI and ShareGPT (``messages: [{role, content}]``,
content a string or a list of parts), FineVision and The Cauldron (``texts: [{user, assistant}]``), one
question with its answer and options a row, and captions under a fixed prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sources import Columns

IMAGE_MARKER = "<image>"
CONVERSATION_COLUMNS = ("conversations", "conversation", "messages", "texts")
IMAGE_COLUMNS = ("images", "image")
QUESTION_COLUMNS = ("question", "query", "prompt")
ANSWER_COLUMNS = ("answer", "answers", "caption", "text", "label", "response")
CHOICE_COLUMNS = ("choices", "options")
ID_COLUMNS = ("id", "question_id", "image_id")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ROLES = {
    "human": "human",
    "user": "human",
    "gpt": "gpt",
    "assistant": "gpt",
    "bot": "gpt",
    "model": "gpt",
    "system": "system",
}

Turn = dict[str, str]


class RowError(ValueError):
    """The row has no form that is known; the message says which columns it has."""


def pick_column(row: Mapping[str, Any], named: str | None, usual: tuple[str, ...]) -> Any:
    """The value of the named column, else of the first usual one that the row has; None where there is none.

    Raises:
        RowError: the named column is not in the row.
    """
    if named is not None:
        if named not in row:
            raise RowError(f"there is no column {named!r}; the columns are {', '.join(row)}")
        return row[named]
    return next((row[name] for name in usual if row.get(name) is not None), None)


def images_of(row: Mapping[str, Any], columns: Columns) -> list[Any]:
    """The row's images, as the data set gives them, in order; a missing one is left out."""
    value = pick_column(row, columns.images, IMAGE_COLUMNS)
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if each is not None and each != ""]


def conversation_of(
    row: Mapping[str, Any], columns: Columns, prompt: str | None, image_count: int
) -> list[Turn]:
    """The row's turns as ``[{from, value}]``.

    Where no turn holds ``<image>`` the markers are put before the first human turn, one per image: that is
    what data sets without markers mean. Other counts are left for the validation pass to report.

    Raises:
        RowError: no known form, or a turn without role or text.
    """
    given = pick_column(row, columns.conversation, CONVERSATION_COLUMNS)
    asked = columns.question or columns.answer or prompt
    turns = _turns(given) if given is not None and not asked else _question_and_answer(row, columns, prompt)
    if image_count and not any(IMAGE_MARKER in turn["value"] for turn in turns):
        for turn in turns:
            if turn["from"] == "human":
                turn["value"] = f"{IMAGE_MARKER}\n" * image_count + turn["value"]
                break
    return turns


def _turns(given: Any) -> list[Turn]:
    if not isinstance(given, (list, tuple)) or not given:
        raise RowError("the conversation is not a list of turns")
    turns: list[Turn] = []
    for turn in given:
        if not isinstance(turn, Mapping):
            raise RowError(f"a turn is no mapping but {type(turn).__name__}")
        if "user" in turn and "assistant" in turn:
            turns.append({"from": "human", "value": _text(turn["user"])})
            turns.append({"from": "gpt", "value": _text(turn["assistant"])})
            continue
        role = turn.get("from") or turn.get("role")
        value = turn.get("value") if turn.get("value") is not None else turn.get("content")
        if role is None or value is None:
            raise RowError(f"a turn has neither (from, value) nor (role, content) but {', '.join(turn)}")
        # an unknown role stays as it is: the validation pass names it with the record
        turns.append({"from": _ROLES.get(str(role).lower(), str(role)), "value": _text(value)})
    return turns


def _text(value: Any) -> str:
    """A string, or a list of parts in which an image stands as its marker."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise RowError(f"the text of a turn is {type(value).__name__}")
    parts = []
    for part in value:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and part.get("text"):
            parts.append(str(part["text"]))
        elif isinstance(part, Mapping) and str(part.get("type", "")).startswith("image"):
            parts.append(IMAGE_MARKER + "\n")
        else:
            raise RowError("a part of a turn is neither text nor image")
    return "".join(parts)


def _question_and_answer(row: Mapping[str, Any], columns: Columns, prompt: str | None) -> list[Turn]:
    question = prompt or pick_column(row, columns.question, QUESTION_COLUMNS)
    answer = pick_column(row, columns.answer, ANSWER_COLUMNS)
    if question is None or answer is None:
        raise RowError(
            f"neither a conversation nor a question with its answer; the columns are {', '.join(row)}"
        )
    if isinstance(answer, (list, tuple)):
        if not answer:
            raise RowError("the list of answers is empty")
        answer = answer[0]
    choices = pick_column(row, columns.choices, CHOICE_COLUMNS)
    if isinstance(choices, (list, tuple)) and choices:
        lines = [f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
        question = "\n".join([str(question), *lines, "Answer with the option letter only."])
        answer = _letter(answer, list(choices))
    return [{"from": "human", "value": str(question)}, {"from": "gpt", "value": str(answer)}]


def _letter(answer: Any, choices: list[Any]) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return LETTERS[answer]
    if answer in choices:
        return LETTERS[choices.index(answer)]
    if isinstance(answer, str) and len(answer) == 1 and answer in LETTERS[: len(choices)]:
        return answer
    raise RowError(f"the answer {answer!r} is none of the {len(choices)} choices")
