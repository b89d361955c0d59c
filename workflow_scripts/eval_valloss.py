#!/usr/bin/env python3
"""Validation loss of a checkpoint: per-sample losses in batches of like length, on any number of ranks.

Writes eval_results.json, all_results.json, per_sample_losses.jsonl and run_record.json. An interrupted run
goes on where it stopped when the same command is given again.

    python workflow_scripts/eval_valloss.py --checkpoint DIR --data data/mm-mix-tmdb
    accelerate launch --num_processes 8 workflow_scripts/eval_valloss.py --checkpoint DIR --data
    data/mm-mix-tmdb
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from odb_workflow.runtime.errors import run_main

CODE_VERSION = 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from odb_workflow.evaluation.arguments import add_common_arguments

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    data = parser.add_argument_group("data; as in training")
    data.add_argument("--data", default="data/mm-mix-tmdb", help="TMDB folder")
    data.add_argument(
        "--validation", help="folder that validate_tmdb.py wrote; without it the TMDB is validated first"
    )
    data.add_argument(
        "--split-mode", default="lf_val_size", choices=["lf_val_size", "prefix", "tail", "grouped"]
    )
    data.add_argument(
        "--val-size", type=float, default=0.05, help="share of the records, or their number above 1"
    )
    data.add_argument("--split-seed", type=int, default=42)
    data.add_argument("--val-start", type=int, help="first validation row of --split-mode tail")
    data.add_argument("--max-length", type=int, default=16384, help="longest sample in tokens")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate; see the module's docstring."""
    arguments = parse_arguments(argv)
    from odb_workflow.evaluation import valloss_data
    from odb_workflow.evaluation.partial import PartialResults
    from odb_workflow.evaluation.plan import plan_batches
    from odb_workflow.evaluation.runner import score_items
    from odb_workflow.evaluation.session import (
        load_session_forward,
        load_session_processor,
        make_collator,
        make_worker_settings,
        open_session,
        publish_results,
    )
    from odb_workflow.evaluation.valloss import FOLDER, loss_scorer, per_sample_rows, summarize_losses
    from odb_workflow.runtime.provenance import without_home
    from odb_workflow.tmdb.records import BadRecord

    with open_session(arguments, FOLDER) as session:
        processor = load_session_processor(session, arguments)
        data = valloss_data.load(arguments, session, processor)
        loader = make_worker_settings(session, arguments)
        forward = load_session_forward(session, arguments, int(sum(data.lengths)))
        settings = {**session.settings(), **data.settings}
        partial = PartialResults(
            session.folder, {"evaluation": "valloss", "code_version": CODE_VERSION, **settings}
        )
        statistics = score_items(
            data.items,
            plan_batches(
                data.lengths,
                session.token_budget,
                packed=session.packed,
                max_samples=arguments.batch_max_samples,
            ),
            make_collator(session, forward, processor),
            loss_scorer(forward),
            ranks=session.ranks,
            partial=partial,
            loader=loader,
            known_errors=(BadRecord,),
            progress="validation loss",
        )

        def write() -> None:
            lines = per_sample_rows(data.ids, data.rows, data.sources, statistics.values)
            results = {
                **summarize_losses(lines),
                **session.identity(),
                "data": without_home(arguments.data),
                **data.settings,
                "code_version": CODE_VERSION,
            }
            publish_results(
                session,
                {"per_sample_losses.jsonl": lines, "all_results.json": results, "eval_results.json": results},
                statistics=statistics,
                switches=forward.switches,
                loader=loader,
                extra={"evaluation": "valloss", "code_version": CODE_VERSION},
            )
            partial.remove()
            print(
                f"eval_loss {results['eval_loss']:.4f}  token_weighted_eval_loss "
                f"{results['token_weighted_eval_loss']:.4f}  samples {results['eval_samples']}  "
                f"-> {session.folder / 'eval_results.json'}",
                flush=True,
            )

        session.ranks.main_only(write)


if __name__ == "__main__":
    run_main(main)
