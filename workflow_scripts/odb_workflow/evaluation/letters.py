"""The tokens that stand for the letters A to H right after the rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from odb_workflow.runtime.errors import UserError

from .mmmu_protocol import LETTERS, PROMPT_SUFFIX


def letter_token_ids(tokenizer: Any, rendered_prompt: str) -> list[int]:
    """The token id of each letter A-H as the continuation of ``rendered_prompt``.

    The prompt is encoded with and without the letter, because a letter alone can be another token (with a
    word-start mark, say) than the letter that follows the generation prompt.

    Returns:
        Eight distinct ids, in the order of the letters.

    Raises:
        UserError: a letter is not exactly one token there, changes the tokens before it, or shares its token.
    """
    prompt_ids = _encode(tokenizer, rendered_prompt)
    ids: list[int] = []
    for letter in LETTERS:
        with_letter = _encode(tokenizer, rendered_prompt + letter)
        added = with_letter[len(prompt_ids) :]
        if with_letter[: len(prompt_ids)] != prompt_ids or len(added) != 1:
            tail = tokenizer.convert_ids_to_tokens(with_letter[max(len(prompt_ids) - 2, 0) :])
            raise UserError(
                f"the letter {letter} is not one token after the prompt: {tail}",
                where=f"tokenizer of the checkpoint, prompt ending in {rendered_prompt[-40:]!r}",
                fix="score this checkpoint with a tokenizer that keeps the letters A-H as single tokens",
            )
        ids.append(int(added[0]))
    unknown = getattr(tokenizer, "unk_token_id", None)
    if len(set(ids)) != len(ids) or unknown in ids:
        pairs = ", ".join(f"{letter}={token}" for letter, token in zip(LETTERS, ids, strict=True))
        raise UserError(
            f"the letters A-H do not have eight distinct known tokens: {pairs}",
            where="tokenizer of the checkpoint",
            fix="score this checkpoint with a tokenizer that keeps the letters A-H apart",
        )
    return ids


def check_prompt_ends(rendered: Sequence[tuple[str, str]]) -> str:
    """Check that all prompts end alike, so that the letter tokens found for one hold for all.

    Args:
        rendered: (sample id, rendered prompt) of every question.

    Returns:
        The common end: everything from the instruction on.

    Raises:
        UserError: a prompt does not hold the instruction, or ends in another way; names the sample.
    """
    common: str | None = None
    for sample_id, prompt in rendered:
        place = prompt.rfind(PROMPT_SUFFIX)
        end = prompt[place:] if place >= 0 else None
        common = end if common is None else common
        if end is None or end != common:
            raise UserError(
                "the chat template does not end the prompt with the instruction and one generation prompt",
                where=f"sample {sample_id}, prompt ending in {prompt[-60:]!r}",
                fix="check chat_template of the checkpoint's processor",
            )
    if common is None:
        raise ValueError("no prompts given")
    return common


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
