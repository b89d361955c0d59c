#!/usr/bin/env python3
"""Fetch model and benchmark into the caches of the Hugging Face libraries; later stages then run offline."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.log import setup_logging

logger = logging.getLogger(__name__)


def fetch_model(name: str, revision: str | None) -> None:
    """Fetch all files of a Hub model.

    Raises:
        UserError: the Hub cannot be reached, or has no such model.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot fetch the model {name!r}: {error}",
            where="model.path (ODB_MM_MIX_MODEL)",
            fix="run this where there is network and HF_HUB_OFFLINE is not set, or give a local folder",
        ) from error
    logger.info("model %s is in %s", name, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Hub id; a local folder needs no fetching")
    parser.add_argument("--revision", help="commit or tag of the model")
    parser.add_argument("--dataset", help="Hub id of the benchmark; a local folder needs no fetching")
    parser.add_argument("--split", default="validation", help="split of the benchmark")
    parser.add_argument("--subjects", default="", help="subjects, separated by commas; default: all")
    options = parser.parse_args()
    setup_logging()
    if options.model and not Path(options.model).exists():
        fetch_model(options.model, options.revision)
    if options.dataset and not Path(options.dataset).exists():
        from odb_workflow.evaluation.mmmu_data import load_benchmark

        subjects = [name for name in options.subjects.split(",") if name] or None
        rows = load_benchmark(options.dataset, options.split, subjects).rows
        logger.info("benchmark %s: %d rows", options.dataset, len(rows))


if __name__ == "__main__":
    run_main(main)
