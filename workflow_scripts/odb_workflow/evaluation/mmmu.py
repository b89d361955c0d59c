"""MMMU choice likelihood: rows to prompts, prompts to samples, letter log-probabilities of each."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odb_workflow.runtime.errors import UserError, combine_errors
from odb_workflow.tmdb.images import BadImage

from .mmmu_data import Benchmark, BenchmarkRow
from .mmmu_protocol import Excluded, Question, RowError, build_question
from .prompts import PromptEncoder, render
from .ranks import EvaluationRanks
from .runner import ItemError

logger = logging.getLogger(__name__)

#: Default results folder of each protocol: their numbers never share a file.
FOLDERS = {"v1": "mmmu_mc_likelihood_accelerate", "inline": "mmmu_mc_likelihood_inline_accelerate"}
_SHOWN_ERRORS = 20


@dataclass
class Prompt:
    """A question with its row, its rendered chat and its length in tokens."""

    question: Question
    row: BenchmarkRow
    rendered: str
    tokens: int = 0


def build_prompts(
    benchmark: Benchmark, processor: Any, *, protocol: str, max_samples: int, bad_rows: str
) -> tuple[list[Prompt], list[Excluded]]:
    """Apply the protocol to each row in order, until ``max_samples`` (0: no limit) are to be scored.

    Args:
        bad_rows: ``error``: list all rows that cannot be scored, then stop; ``exclude``: count them as
            excluded.

    Raises:
        UserError: bad rows under ``error``, or nothing to score.
    """
    prompts: list[Prompt] = []
    excluded: list[Excluded] = []
    errors: list[RowError] = []
    for row in benchmark.rows:
        if max_samples and len(prompts) >= max_samples:
            break
        try:
            built = build_question(
                row.columns,
                sample_id=row.sample_id,
                subject=row.subject,
                present=row.present,
                protocol=protocol,
            )
            rendered = render(processor, built) if isinstance(built, Question) else ""
        except RowError as error:
            errors.append(error)
            excluded.append(
                Excluded(
                    row.sample_id, row.subject, error.reason, str(row.columns.get("answer")), error.detail
                )
            )
            continue
        if isinstance(built, Excluded):
            excluded.append(built)
            continue
        prompts.append(Prompt(built, row, rendered))
        if built.missing_images:
            names = ", ".join(f"<image {number}>" for number in built.missing_images)
            logger.warning(
                "%s names %s, which the row does not hold; it is scored as it stands", row.sample_id, names
            )
    report_bad_rows(errors, bad_rows)
    if not prompts:
        raise UserError(
            f"no row can be scored: {len(excluded)} of {len(excluded)} rows are excluded",
            where="--dataset, --subjects, --split",
            fix="check that the answers are single letters A-H",
        )
    return prompts, excluded


def report_bad_rows(errors: Sequence[RowError], bad_rows: str) -> None:
    """Stop with a list of all bad rows, or warn about each.

    Raises:
        UserError: there are errors and ``bad_rows`` is ``error``.
    """
    for error in errors if bad_rows == "exclude" else ():
        logger.warning("excluded: %s", error)
    if errors and bad_rows == "error":
        shown = [str(error) for error in errors[:_SHOWN_ERRORS]]
        more = [f"and {len(errors) - _SHOWN_ERRORS} more"] if len(errors) > _SHOWN_ERRORS else []
        raise combine_errors(
            [*shown, *more],
            f"{len(errors)} row(s) cannot be scored; mend them, or count them out with --bad-rows exclude",
        )


def measure_prompts(
    prompts: Sequence[Prompt], encoder: PromptEncoder, ranks: EvaluationRanks, threads: int
) -> list[RowError]:
    """Set ``tokens`` of each prompt and check its images by decoding them, shared among the ranks.

    Returns:
        The rows whose images cannot be read, in order, on every rank.
    """
    mine = range(ranks.rank, len(prompts), ranks.world_size)
    with concurrent.futures.ThreadPoolExecutor(max(1, threads)) as pool:
        measured = list(pool.map(lambda index: _measure(prompts[index], encoder), mine))
    errors: dict[int, tuple[str, str, str]] = {}
    for part in ranks.gather(list(zip(mine, measured, strict=True))):
        for index, (tokens, fault) in part:
            prompts[index].tokens = tokens
            if fault is not None:
                errors[index] = fault
    return [RowError(*errors[index]) for index in sorted(errors)]


def _measure(prompt: Prompt, encoder: PromptEncoder) -> tuple[int, tuple[str, str, str] | None]:
    question = prompt.question
    try:
        images = [encoder.read(prompt.row.image(number)) for number in question.images]
    except BadImage as error:
        return 0, (question.sample_id, error.reason, f"an image cannot be used: {error.detail}")
    return encoder.length(prompt.rendered, images), None


class PromptItems:
    """Prompts as samples without labels, each named by its MMMU id. Images are decoded when asked for."""

    def __init__(self, prompts: Sequence[Prompt], encoder: PromptEncoder) -> None:
        self.prompts, self.encoder = list(prompts), encoder

    def __len__(self) -> int:
        return len(self.prompts)

    def key(self, index: int) -> str:
        """The MMMU id."""
        return self.prompts[index].question.sample_id

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample of one prompt.

        Raises:
            ItemError: an image cannot be read.
        """
        prompt = self.prompts[index]
        try:
            images = [self.encoder.read(prompt.row.image(number)) for number in prompt.question.images]
        except BadImage as error:
            raise ItemError(f"an image cannot be used: {error.detail}") from error
        return self.encoder.encode(prompt.rendered, images, index)


def letter_scorer(forward: Any, token_ids: Sequence[int], device: torch.device) -> Any:
    """A scorer that gives the log-probabilities of the eight letters, nat, after each prompt's last token."""
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=device)

    def score(batch: dict[str, Any]) -> list[list[float]]:
        return forward(batch, mode="last_logprobs", token_ids=ids).double().cpu().tolist()

    return score
