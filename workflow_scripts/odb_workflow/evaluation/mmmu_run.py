"""One MMMU evaluation from rows to result files."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from odb_workflow.processing.identity import processor_identity
from odb_workflow.runtime.provenance import without_home

from .letters import check_prompt_ends, letter_token_ids
from .mmmu import Prompt, PromptItems, build_prompts, letter_scorer, measure_prompts, report_bad_rows
from .mmmu_data import Benchmark, load_benchmark
from .mmmu_protocol import PROMPT_SUFFIX, PROTOCOLS, Excluded
from .mmmu_subjects import parse_subjects
from .partial import PartialResults
from .plan import plan_batches
from .prompts import PromptEncoder
from .runner import ItemError, RunStatistics, score_items
from .scoring import MARGINS, audit, excluded_record, needs_rescoring, prediction_record, summarize
from .session import (
    Session,
    load_session_forward,
    load_session_processor,
    make_collator,
    make_worker_settings,
    publish_results,
)

logger = logging.getLogger(__name__)


def evaluate(session: Session, arguments: argparse.Namespace, *, code_version: int) -> None:
    """Score the benchmark and write its files.

    Raises:
        UserError: see the modules that read the dataset, build the prompts and score.
    """
    protocol = PROTOCOLS[arguments.protocol]
    ranks = session.ranks

    def load() -> Benchmark:
        return load_benchmark(arguments.dataset, arguments.split, parse_subjects(arguments.subjects))

    if ranks.world_size > 1 and not Path(arguments.dataset).exists():
        ranks.main_only(lambda: load() and None)  # one download, which the others then find in the cache
    benchmark = ranks.together(load)
    if benchmark.absent and ranks.main:
        logger.warning("%d of MMMU's 30 subjects are not in %s", len(benchmark.absent), arguments.dataset)
    processor = load_session_processor(session, arguments)
    encoder = PromptEncoder(processor)
    prompts, excluded = ranks.together(
        lambda: build_prompts(
            benchmark,
            processor,
            protocol=protocol,
            max_samples=arguments.max_samples,
            bad_rows=arguments.bad_rows,
        )
    )
    prompts, excluded = _measured(session, arguments, prompts, excluded, encoder)
    end, token_ids = ranks.together(
        lambda: (
            check_prompt_ends([(prompt.question.sample_id, prompt.rendered) for prompt in prompts]),
            letter_token_ids(processor.tokenizer, prompts[0].rendered),
        )
    )
    settings = {
        **session.settings(),
        "evaluation": "mmmu",
        "code_version": code_version,
        "protocol": protocol,
        "data_sha256": ranks.main_only(benchmark.checksum),
        "split": arguments.split,
        "subjects": benchmark.subjects,
        "max_samples": arguments.max_samples,
        "processor_sha256": processor_identity(processor)["sha256"],
        "prompt_end": end,
        "letter_token_ids": token_ids,
    }
    loader = make_worker_settings(session, arguments)
    forward = load_session_forward(session, arguments, sum(prompt.tokens for prompt in prompts))
    partial = PartialResults(session.folder, settings)
    shared = {
        "collator": make_collator(session, forward, processor),
        "scorer": letter_scorer(forward, token_ids, ranks.device),
        "ranks": ranks,
        "loader": loader,
        "known_errors": (ItemError,),
    }
    lengths = [prompt.tokens for prompt in prompts]
    batches = plan_batches(
        lengths, session.token_budget, packed=session.packed, max_samples=arguments.batch_max_samples
    )
    items = PromptItems(prompts, encoder)
    statistics = score_items(items, batches, partial=partial, progress="MMMU", **shared)
    close = [
        index
        for index, prompt in enumerate(prompts)
        if needs_rescoring(
            statistics.values[items.key(index)], prompt.question.valid_letters, MARGINS[session.precision]
        )
    ]
    alone = _score_alone(items, close, lengths, session, settings, shared)

    def write() -> None:
        _write(
            session,
            arguments,
            benchmark,
            prompts,
            excluded,
            settings,
            statistics,
            alone,
            tokens=processor.tokenizer.convert_ids_to_tokens(token_ids),
            forward=forward,
            loader=loader,
        )
        partial.remove()

    ranks.main_only(write)


def _measured(
    session: Session,
    arguments: argparse.Namespace,
    prompts: list[Prompt],
    excluded: list[Excluded],
    encoder: PromptEncoder,
) -> tuple[list[Prompt], list[Excluded]]:
    """Lengths of the prompts; rows whose images cannot be read stop the run or join the excluded."""
    threads = len(os.sched_getaffinity(0)) // session.ranks.local_world_size
    errors = measure_prompts(prompts, encoder, session.ranks, min(threads, 16))
    session.ranks.main_only(lambda: report_bad_rows(errors, arguments.bad_rows))
    broken = {error.sample_id: error for error in errors}
    for prompt in prompts:
        name = prompt.question.sample_id
        if name in broken:
            error = broken[name]
            excluded.append(
                Excluded(name, prompt.question.subject, error.reason, prompt.question.answer, error.detail)
            )
    return [prompt for prompt in prompts if prompt.question.sample_id not in broken], excluded


def _score_alone(
    items: PromptItems,
    close: list[int],
    lengths: list[int],
    session: Session,
    settings: dict[str, Any],
    shared: dict[str, Any],
) -> RunStatistics:
    """Score the rows in ``close`` again, each in a batch of its own, so that no other row can tip the
    letter.
    """
    if not close:
        return RunStatistics()
    partial = PartialResults(session.folder, settings, phase="close-calls")
    order = sorted(close, key=lambda index: (-lengths[index], index))
    return score_items(items, [[index] for index in order], partial=partial, progress="close calls", **shared)


def _write(
    session: Session,
    arguments: argparse.Namespace,
    benchmark: Benchmark,
    prompts: list[Prompt],
    excluded: list[Excluded],
    settings: dict[str, Any],
    statistics: RunStatistics,
    alone: RunStatistics,
    *,
    tokens: list[str],
    forward: Any,
    loader: Any,
) -> None:
    protocol = settings["protocol"]
    predictions = []
    for prompt in prompts:
        name = prompt.question.sample_id
        scores = alone.values.get(name, statistics.values[name])
        predictions.append(
            prediction_record(
                prompt.question,
                scores,
                protocol=protocol,
                split=arguments.split,
                rescored=name in alone.values,
            )
        )
    left_out = [excluded_record(row, protocol=protocol, split=arguments.split) for row in excluded]
    results = {
        "protocol": protocol,
        "note": "choice likelihood of one letter; not comparable with leaderboards of generated answers",
        "split": arguments.split,
        "dataset": without_home(arguments.dataset),
        "subjects": benchmark.subjects,
        "mmmu_subjects_absent": benchmark.absent,
        **summarize(predictions, left_out, benchmark.subjects),
        **session.identity(),
        "data_sha256": settings["data_sha256"],
        "max_samples": arguments.max_samples,
        "image_max_pixels": arguments.image_max_pixels,
        "rescoring_margin_nat": MARGINS[session.precision],
        "code_version": settings["code_version"],
    }
    checked = {
        "protocol": protocol,
        "prompt_suffix": PROMPT_SUFFIX,
        "prompt_end": settings["prompt_end"],
        **audit(predictions, results, settings["letter_token_ids"], tokens),
        "score_meta_examples": [
            {
                "subject": prompt.question.subject,
                "sample_id": prompt.question.sample_id,
                "prompt_tokens": prompt.tokens,
                "rendered_chat_chars": len(prompt.rendered),
                "rendered_chat": prompt.rendered,
            }
            for prompt in prompts[:5]
        ],
    }
    publish_results(
        session,
        {
            "predictions.jsonl": predictions,
            "excluded.jsonl": left_out,
            "score_audit.json": checked,
            "mmmu_mc_likelihood_results.json": results,
        },
        statistics=statistics,
        switches=forward.switches,
        loader=loader,
        extra={
            "evaluation": "mmmu",
            "code_version": settings["code_version"],
            "close_calls_scored_alone": len(alone.values),
            "close_calls_seconds": alone.seconds,
        },
    )
    print(
        f"{protocol}: {results['overall_accuracy']:.2f} % of {results['num_scored']} "
        f"(standard error {results['overall_standard_error']:.2f}, chance {results['chance_accuracy']:.2f}, "
        f"excluded {results['excluded_samples']}) -> {session.folder / 'mmmu_mc_likelihood_results.json'}",
        flush=True,
    )
