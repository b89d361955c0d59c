#!/usr/bin/env python3
"""Check out the dataset builder: the embedded one from this repository, or a git repository at a ref."""

from __future__ import annotations

import argparse
from pathlib import Path

from odb_workflow.runtime.errors import run_main
from odb_workflow.runtime.files import atomic_write_json
from odb_workflow.runtime.log import setup_logging
from odb_workflow.tmdb.builders.checkout import clone_builder, copy_embedded_builder

CODE_VERSION = 1
EMBEDDED = Path(__file__).resolve().parent.parent / "dataset_builder"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["embedded", "git"], required=True)
    parser.add_argument("--repo", help="git: URL, local path or bundle; none: use --checkout as it is")
    parser.add_argument(
        "--ref", help="git: branch, tag or commit; pin a commit for a result that can be repeated"
    )
    parser.add_argument("--checkout", type=Path, required=True, help="folder of the checkout")
    parser.add_argument("--record", type=Path, help="JSON file to write: what was checked out")
    parser.add_argument(
        "--refresh", action="store_true", help="git: fetch although repository and ref are the same"
    )
    options = parser.parse_args()
    setup_logging()
    if options.kind == "embedded":
        record = copy_embedded_builder(EMBEDDED, options.checkout)
    else:
        record = clone_builder(options.repo, options.ref, options.checkout, refresh=options.refresh)
    if options.record:
        atomic_write_json(options.record, record)
    print(f"dataset builder in {options.checkout} (commit {record['commit'] or 'of this repository'})")


if __name__ == "__main__":
    run_main(main)
