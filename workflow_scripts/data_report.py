#!/usr/bin/env python3
"""Report on a validated TMDB: records and lengths per source, images, rejects, and leaks of the split.

Writes data_report.json and data_report.html to --output-dir. Where the validation stopped, the report lists
what to mend.

    python workflow_scripts/data_report.py --data data/mm-mix-tmdb --validation outputs/check \\
        --output-dir outputs/check/report
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from odb_workflow.runtime.errors import run_main

CODE_VERSION = 2


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="folder with metadata.json, records.jsonl and the images")
    add("--validation", required=True, help="folder that validate_tmdb.py wrote")
    add("--output-dir", type=Path, required=True, help="folder for the report")
    add("--split-mode", default="lf_val_size", help="lf_val_size, prefix, tail or grouped")
    add("--val-size", type=float, default=0.05, help="validation part: share of all records, or a number")
    add("--split-seed", type=int, default=42)
    add("--val-start", type=int, default=None, help="with tail: first validation row")
    add("--train-size", type=int, default=0, help="training records to use, 0: all")
    return parser.parse_args(argv)


def main() -> None:
    """Report; see the module's docstring."""
    arguments = parse_arguments()
    from odb_workflow.runtime.files import atomic_write_json, atomic_write_text
    from odb_workflow.runtime.log import setup_logging
    from odb_workflow.tmdb.pages import data_report_page
    from odb_workflow.tmdb.report import build_report
    from odb_workflow.tmdb.store import RecordStore

    setup_logging()
    split = {
        "mode": arguments.split_mode,
        "val_size": arguments.val_size,
        "split_seed": arguments.split_seed,
        "train_size": arguments.train_size,
        "val_start": arguments.val_start,
    }
    report = build_report(RecordStore(arguments.data), arguments.validation, split)
    report["code_version"] = CODE_VERSION
    atomic_write_json(arguments.output_dir / "data_report.json", report)
    atomic_write_text(arguments.output_dir / "data_report.html", data_report_page(report))
    logging.getLogger(__name__).info("wrote %s", arguments.output_dir / "data_report.html")


if __name__ == "__main__":
    run_main(main)
