"""One record of a TMDB: its form, and every way in which it can be wrong.

The rules, one per kind:

* ``id`` is a non-empty string. A whole number is taken as its decimal text, so ``7`` and ``"7"`` are the
  same id.
  Ids are compared exactly (``Case-1`` and ``case-1`` differ) and are never used as file names.
* Turns keep their order and are never merged. Roles are ``human``/``user``, ``gpt``/``assistant`` and
  ``system``; any other role is a fault. A system turn may only stand first, because chat templates drop it
  elsewhere.
  Several human or several gpt turns in a row are accepted as they stand, so is a first turn by gpt, and a
  last turn by human; that last turn is read by the model but has nothing to learn.
* Every gpt turn is supervised, so each needs text: one empty gpt turn makes the whole record a fault. A
  human turn of only ``<image>`` is legal; one without text and without image is accepted with a note.
* ``<image>`` stands for the next image and belongs in human turns. Their number must equal ``len(images)``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..runtime.errors import UserError

IMAGE_MARKER = "<image>"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
MAX_ID_CHARACTERS = 1024
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; ``role`` is user, assistant or system, ``text`` keeps its ``<image>`` markers."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Record:
    """One record with all its form checked; the images have not been opened."""

    id: str
    source: str
    images: tuple[str, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Reason:
    """A kind of fault: what it means, how to mend it, and whether it stops under every policy."""

    meaning: str
    fix: str
    always_stops: bool = False


REASONS: dict[str, Reason] = {
    # The file
    "broken_json": Reason("the line is not one JSON object", "mend or remove the line", True),
    "missing_id": Reason("the record has no usable id", "give it a non-empty string id", True),
    "duplicate_id": Reason("several records share one id", "give each record its own id", True),
    "path_outside": Reason(
        "the image path leaves the dataset folder (.., absolute, link, address)",
        "copy the image into the dataset folder and name it by a relative path",
        True,
    ),
    # The record
    "missing_source": Reason("the record has no source", "set source to a non-empty string"),
    "bad_images": Reason("images is not a list of relative paths", "write a list of strings"),
    "bad_conversation": Reason("conversations is missing or not a list of turns", "write a list of turns"),
    "bad_turn": Reason("a turn is not {from, value} with text", "write both keys, value as a string"),
    "unknown_role": Reason("a turn has an unknown role", "use human, gpt or system"),
    "system_not_first": Reason("a system turn stands after another turn", "move it to the front"),
    "no_answer": Reason(
        "the record has no gpt turn, so nothing to learn", "add an answer or remove the record"
    ),
    "empty_answer": Reason("a gpt turn has no text", "write the answer or remove the record"),
    "placeholder_count": Reason(
        "the number of <image> placeholders differs from the number of images",
        "write one placeholder per image",
    ),
    "placeholder_outside_human": Reason("<image> stands in a gpt or system turn", "move it to a human turn"),
    "bad_text": Reason("a text holds half a surrogate pair", "write the text as valid Unicode"),
    "special_token": Reason(
        "a text holds a control token of the model's template", "remove or rewrite the token in the text"
    ),
    # The images
    "missing_file": Reason("the image file does not exist", "add the file"),
    "not_a_file": Reason("the image path is not a regular file", "put an image file there"),
    "unreadable_file": Reason("the image file cannot be opened", "check its permissions and the disk"),
    "broken_image": Reason("the image file cannot be decoded", "replace the file"),
    "unsupported_image": Reason(
        "the image has a format or mode that cannot be read", "save it as PNG or JPEG"
    ),
    "image_too_large": Reason("the image has too many pixels or bytes", "save a smaller copy"),
    "extreme_aspect": Reason("one side of the image is more than 200 times the other", "crop the image"),
    # The sample
    "over_length": Reason(
        "the sample is longer than max_length and cannot be cut in text alone",
        "raise max_length or shorten it",
    ),
    "no_label_tokens": Reason("no token of the sample is supervised", "check the answer's text"),
    "template_error": Reason("the chat template does not render the conversation", "see the detail"),
    "processor_error": Reason("the model's processor refuses the sample", "see the detail"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one record. ``file`` is the image path where the fault lies in an image."""

    reason: str
    detail: str
    file: str | None = None


class BadRecord(UserError):
    """A record that cannot become a sample.

    Args:
        reason: A key of ``REASONS``.
        record_id: The record's id, where it has one.
        row: 0-based index of the record in ``records.jsonl``.
        detail: What exactly is wrong.
        file: The image path at fault.
    """

    def __init__(
        self, reason: str, *, record_id: str = "", row: int = -1, detail: str = "", file: str | None = None
    ) -> None:
        self.reason, self.record_id, self.row, self.detail, self.file = reason, record_id, row, detail, file
        known = REASONS.get(reason)
        where = f"record {record_id!r}, row {row}" + (f", file {file}" if file else "")
        what = f"{reason}: {detail or (known.meaning if known else '')}"
        super().__init__(what, where=where if row >= 0 else None, fix=known.fix if known else None)

    def __reduce__(self):
        return _rebuild, (self.reason, self.record_id, self.row, self.detail, self.file)


def _rebuild(reason: str, record_id: str, row: int, detail: str, file: str | None) -> BadRecord:
    return BadRecord(reason, record_id=record_id, row=row, detail=detail, file=file)


@dataclass(slots=True)
class Checked:
    """Outcome of the check of one line: the record (None where its form is too broken), faults, notes."""

    record: Record | None = None
    record_id: str | None = None
    source: str | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, number in counts.items() if number > 1)
        raise ValueError(f"key {_short(twice)} stands twice in one object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant).decode


def parse_line(line: bytes) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        ValueError: the line is not UTF-8, not JSON, not an object, or repeats a key; says which.
    """
    try:
        value = _decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from None
    except ValueError as error:
        if "sys.set_int_max_str_digits" in str(error):  # Python's limit, and its advice is for programmers
            raise ValueError("a number has too many digits") from None
        raise
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    return value


def normalize_id(value: Any) -> str | None:
    """The id as a string, or None where it is no id. Whole numbers become their decimal text."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_ID_CHARACTERS:
        return None
    return None if _SURROGATE.search(value) else value


def _check_images(value: Any, checked: Checked) -> tuple[str, ...] | None:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        checked.faults.append(Fault("bad_images", f"images is {_short(value)}"))
        return None
    if any(_SURROGATE.search(item) for item in value):
        checked.faults.append(Fault("bad_images", f"a path holds half a surrogate pair: {_short(value)}"))
        return None
    return tuple(value)


def _check_turns(value: Any, checked: Checked) -> list[Turn] | None:
    """The turns that could be read; None where there is no list of turns at all."""
    if not isinstance(value, list):
        checked.faults.append(Fault("bad_conversation", f"conversations is {_short(value)}"))
        return None
    turns = []
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict) or not isinstance(item.get("from"), str) or "value" not in item:
            checked.faults.append(Fault("bad_turn", f"turn {number} is {_short(item)}"))
            continue
        role, text = ROLES.get(item["from"]), item["value"]
        if role is None:
            checked.faults.append(Fault("unknown_role", f"turn {number} has role {item['from'][:40]!r}"))
            continue
        if role == "assistant" and (text is None or (isinstance(text, str) and not text.strip())):
            checked.faults.append(Fault("empty_answer", f"turn {number} has value {_short(text)}"))
            text = text or ""
        if not isinstance(text, str):
            checked.faults.append(Fault("bad_turn", f"turn {number} has value {_short(text)}, not text"))
            continue
        if _SURROGATE.search(text):
            checked.faults.append(Fault("bad_text", f"turn {number} holds half a surrogate pair"))
        if role == "system" and number > 1:
            checked.faults.append(Fault("system_not_first", f"turn {number} is a system turn"))
        if role != "user" and IMAGE_MARKER in text:
            checked.faults.append(
                Fault("placeholder_outside_human", f"turn {number} ({item['from']}) holds <image>")
            )
        if role == "user" and not text.strip():
            checked.notes.append("empty_question")
        turns.append(Turn(role, text))
    if not any(turn.role == "assistant" for turn in turns):
        checked.faults.append(Fault("no_answer", f"{len(value)} turns, none by gpt"))
    return turns


def check_record(value: dict[str, Any]) -> Checked:
    """Check the form of one record completely; all its faults are listed, not only the first."""
    checked = Checked()
    checked.record_id = normalize_id(value.get("id"))
    if checked.record_id is None:
        checked.faults.append(Fault("missing_id", f"id is {_short(value.get('id'))}"))
    source = value.get("source")
    if isinstance(source, str) and source.strip() and not _SURROGATE.search(source):
        checked.source = source
    else:
        checked.faults.append(Fault("missing_source", f"source is {_short(source)}"))
    images = _check_images(value.get("images"), checked)
    if "conversations" in value and "conversation" in value:
        checked.faults.append(Fault("bad_conversation", "both conversations and conversation are present"))
        turns = None
    else:
        turns = _check_turns(value.get("conversations", value.get("conversation")), checked)
    if images is not None and turns is not None:
        placeholders = sum(turn.text.count(IMAGE_MARKER) for turn in turns if turn.role == "user")
        if placeholders != len(images):
            detail = f"{placeholders} placeholders <image>, {len(images)} images"
            checked.faults.append(Fault("placeholder_count", detail))
        checked.record = Record(checked.record_id or "", checked.source or "", images, tuple(turns))
    return checked


def record_from_line(line: bytes, row: int) -> Record:
    """The record of one line.

    Raises:
        BadRecord: the line is not JSON or the record's form is at fault.
    """
    try:
        checked = check_record(parse_line(line))
    except ValueError as error:
        raise BadRecord("broken_json", row=row, detail=str(error)) from None
    if checked.faults or checked.record is None:
        first = checked.faults[0]
        raise BadRecord(first.reason, record_id=checked.record_id or "", row=row, detail=first.detail)
    return checked.record


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
