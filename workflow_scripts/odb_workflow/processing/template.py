"""Rendering a conversation with the model's chat template, and where the answers stand in the result.

The template is rendered once per *shape* of conversation (roles, places of the images) with markers in
place of the texts. The literals between the markers are what the template adds; a record's rendered text
is those literals with its own texts filled in, so the place of every answer is known exactly, for any
template. ``check=True`` also renders the record itself and compares, which finds templates whose output
depends on the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..tmdb.records import IMAGE_MARKER, BadRecord, Fault, Record, Turn

_OPEN, _CLOSE = "⟦", "⟧"  # printable, so that they can be found in the repr of a list too
_SLOT = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_CACHE_LIMIT = 4096

#: Role with its texts and images (None) in order, for each turn.
Turns = list[tuple[str, list[str | None]]]
Shape = tuple[tuple[str, tuple[bool, ...]], ...]


class TemplateError(ValueError):
    """The chat template does not render this shape of conversation."""


def turn_parts(turn: Turn) -> list[str | None]:
    """The turn as texts and images (None) in order; empty texts are left out unless the turn is empty."""
    if turn.role != "user" or IMAGE_MARKER not in turn.text:
        return [turn.text]
    parts: list[str | None] = []
    for number, text in enumerate(turn.text.split(IMAGE_MARKER)):
        if number:
            parts.append(None)
        if text:
            parts.append(text)
    return parts


def to_messages(turns: Turns, plain: frozenset[str]) -> list[dict[str, Any]]:
    """Chat messages with content lists, the form that vision-language templates take.

    Turns of the roles in ``plain`` become one string, for templates that print a role's content as it is.
    """
    messages = []
    for role, parts in turns:
        content: Any = []
        for part in parts:
            content.append({"type": "image"} if part is None else {"type": "text", "text": part})
        if role in plain and None not in parts:
            content = "".join(parts)
        messages.append({"role": role, "content": content})
    return messages


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A rendered shape: ``literals[0] + text 0 + literals[1] + text 1 + ...``.

    Attributes:
        answers: Whether text k is an answer.
        tails: How many characters of the literal after text k belong to the answer (its end token).
        strips: Whether the template strips text k at its start and end.
    """

    literals: tuple[str, ...]
    answers: tuple[bool, ...]
    tails: tuple[int, ...]
    strips: tuple[tuple[bool, bool], ...]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The conversation as text; ``spans`` are the supervised [start, end) character ranges, ascending."""

    text: str
    spans: tuple[tuple[int, int], ...]


class TemplateRenderer:
    """Renders records with a processor's chat template.

    Args:
        processor: A processor with ``apply_chat_template`` and a fast tokenizer.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        tokenizer = processor.tokenizer
        added = tokenizer.added_tokens_decoder.values()
        control = {token.content for token in added if token.special or _looks_like_control(token.content)}
        control |= {token for token in tokenizer.all_special_tokens if token}
        image_token = getattr(processor, "image_token", None)
        self.image_token: str | None = image_token
        if image_token:
            control.add(image_token)
        ordered = sorted(control, key=len, reverse=True)
        #: Any token that a user's text must not hold.
        self.control = re.compile("|".join(map(re.escape, ordered))) if ordered else re.compile("(?!)")
        self._skeletons: dict[Shape, Skeleton] = {}
        self._plain: frozenset[str] = frozenset()
        self._strips: dict[str, tuple[bool, bool]] = {}
        self._probe()

    def _apply(self, turns: Turns) -> str:
        messages = to_messages(turns, self._plain)
        try:
            return self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        except Exception as error:  # templates raise jinja2 errors, TypeError, KeyError, ... as they like
            raise TemplateError(f"{type(error).__name__}: {error}"[:300]) from error

    def _probe(self) -> None:
        """Find which roles' texts the template strips, and which it prints as they are."""
        roles = ("system", "user", "assistant", "user", "assistant")
        for start in (0, 1):  # some templates take no system turn
            turns: Turns = [(role, [f" {_OPEN}{number}{_CLOSE} "]) for number, role in enumerate(roles)][
                start:
            ]
            try:
                text = self._apply(turns)
                printed = {role for role, (part,) in turns if f"'{part}'" in text or f'"{part}"' in text}
                self._plain = frozenset(printed)
                text = self._apply(turns)
            except TemplateError:
                self._plain = frozenset()
                continue
            for role, (part,) in turns:
                marker = part.strip()
                self._strips[role] = (f" {marker}" not in text, f"{marker} " not in text)
            return

    def skeleton(self, shape: Shape) -> Skeleton:
        """The literals of a shape.

        Raises:
            TemplateError: the template fails, drops or reorders a text, or drops an image.
        """
        known = self._skeletons.get(shape)
        if known is not None:
            return known
        slots: list[str] = []
        turns: Turns = []
        n_images = 0
        for role, kinds in shape:
            parts: list[str | None] = []
            for is_image in kinds:
                n_images += is_image
                parts.append(None if is_image else f"{_OPEN}{len(slots)}{_CLOSE}")
                if not is_image:
                    slots.append(role)
            turns.append((role, parts))
        pieces = _SLOT.split(self._apply(turns))
        literals, order = pieces[0::2], [int(number) for number in pieces[1::2]]
        if order != list(range(len(slots))):
            lost = sorted(set(range(len(slots))) - set(order))
            raise TemplateError(
                f"the template drops, repeats or reorders texts (lost: {[slots[k] for k in lost]})"
            )
        if self.image_token and sum(literal.count(self.image_token) for literal in literals) != n_images:
            raise TemplateError(
                f"the template does not write one {self.image_token} for each of {n_images} images"
            )
        answers = tuple(role == "assistant" for role in slots)
        tails = tuple(
            self._tail(literal) if answer else 0
            for literal, answer in zip(literals[1:], answers, strict=True)
        )
        strips = tuple(self._strips.get(role, (False, False)) for role in slots)
        result = Skeleton(tuple(literals), answers, tails, strips)
        if len(self._skeletons) < _CACHE_LIMIT:
            self._skeletons[shape] = result
        return result

    def _tail(self, literal: str) -> int:
        """Characters up to and with the end token, where the answer is followed by one (white space
        between allowed)."""
        found = self.control.search(literal)
        return found.end() if found and not literal[: found.start()].strip() else 0

    def render(self, record: Record, row: int, *, check: bool = False) -> Rendered:
        """The conversation as the template writes it, one image token per image.

        Raises:
            BadRecord: ``special_token`` where a text holds a control token; ``template_error`` where the
                template does not render the conversation, or (``check``) renders it otherwise than its shape
                tells.
        """
        turns = [(turn.role, turn_parts(turn)) for turn in record.turns]
        for fault in self.control_faults(record):
            raise BadRecord(fault.reason, record_id=record.id, row=row, detail=fault.detail)
        try:
            skeleton = self.skeleton(
                tuple((role, tuple(part is None for part in parts)) for role, parts in turns)
            )
            rendered = self._fill(
                skeleton, [part for _, parts in turns for part in parts if part is not None]
            )
            if check and self._apply(turns) != rendered.text:
                raise TemplateError("the template changes the text, so that its answers cannot be marked")
        except TemplateError as error:
            raise BadRecord("template_error", record_id=record.id, row=row, detail=str(error)) from None
        return rendered

    def control_faults(self, record: Record) -> list[Fault]:
        """A fault for each turn whose text holds a control token: it would act as one when tokenized."""
        faults = []
        for number, turn in enumerate(record.turns, start=1):
            texts = [part for part in turn_parts(turn) if part]
            found = next(filter(None, map(self.control.search, texts)), None)
            if found:
                faults.append(Fault("special_token", f"turn {number} holds {found.group()!r}"))
        return faults

    @staticmethod
    def _fill(skeleton: Skeleton, texts: list[str]) -> Rendered:
        pieces = [skeleton.literals[0]]
        spans: list[tuple[int, int]] = []
        position = len(pieces[0])
        for slot, text in enumerate(texts):
            left, right = skeleton.strips[slot]
            text = text.lstrip() if left else text
            text = text.rstrip() if right else text
            literal = skeleton.literals[slot + 1]
            if skeleton.answers[slot]:
                spans.append((position, position + len(text) + skeleton.tails[slot]))
            pieces += (text, literal)
            position += len(text) + len(literal)
        return Rendered("".join(pieces), tuple(spans))


def _looks_like_control(token: str) -> bool:
    return token.startswith("<|") and token.endswith("|>")
