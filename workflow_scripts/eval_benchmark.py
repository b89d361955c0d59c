#!/usr/bin/env python3
"""MMMU multiple choice by letter likelihood, batched, on any number of ranks.

Protocol v1 (MMMU-MC-choice-likelihood-v1) is the published one; `inline` places each image where it is named
and is a protocol of its own. Writes mmmu_mc_likelihood_results.json, predictions.jsonl, excluded.jsonl,
score_audit.json and run_record.json. An interrupted run goes on where it stopped when the same command is
given again.

    python workflow_scripts/eval_benchmark.py --checkpoint DIR --dataset MMMU/MMMU
    accelerate launch --num_processes 8 workflow_scripts/eval_benchmark.py --checkpoint DIR --subjects
    Art,Math
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
    data = parser.add_argument_group("benchmark")
    data.add_argument(
        "--dataset",
        default="MMMU/MMMU",
        help="Hub id, folder with one folder of parquet files per subject, saved dataset, or one file",
    )
    data.add_argument("--split", default="validation")
    data.add_argument("--subjects", help="comma-separated; default: all")
    data.add_argument("--protocol", choices=["v1", "inline"], default="v1")
    data.add_argument(
        "--bad-rows",
        choices=["error", "exclude"],
        default="error",
        help="rows that cannot be scored (options that are no list, broken images): list them and "
        "stop, or count them as excluded",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate; see the module's docstring."""
    arguments = parse_arguments(argv)
    from odb_workflow.evaluation.mmmu import FOLDERS
    from odb_workflow.evaluation.mmmu_run import evaluate
    from odb_workflow.evaluation.session import open_session

    with open_session(arguments, FOLDERS[arguments.protocol]) as session:
        evaluate(session, arguments, code_version=CODE_VERSION)


if __name__ == "__main__":
    run_main(main)
