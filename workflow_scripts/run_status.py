#!/usr/bin/env python3
"""What is finished (`status`) and where results come from (`provenance`); reads files only.

run_status.py status
run_status.py provenance [--json]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from odb_workflow.config.load import load_config
from odb_workflow.runtime.errors import run_main
from odb_workflow.runtime.files import dump_json
from odb_workflow.workflow.guard import findings, read_last_run
from odb_workflow.workflow.paths import Paths
from odb_workflow.workflow.provenance_text import provenance_text
from odb_workflow.workflow.status import records, status_text

SCRIPTS = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["status", "provenance"])
    parser.add_argument("--json", action="store_true", help="provenance: the whole records")
    parser.add_argument("--configfile", nargs="+", default=[], help="presets, as for Snakemake")
    options = parser.parse_args()
    config = load_config(SCRIPTS.parent, environment=os.environ, configfiles=options.configfile).config
    paths = Paths(config)
    if options.what == "provenance":
        found = records(Path(paths.output), Path(paths.results))
        print(dump_json(found, indent=2) if options.json else provenance_text(found))
        return
    runs = {paths.output: None, **({last: None} if (last := read_last_run()) else {})}
    runs |= {str(path): None for path in sorted(Path("outputs").glob("*")) if path.is_dir()}
    print("\n\n".join(status_text(Path(output), SCRIPTS) for output in runs))
    for item in findings(config, list(config.arms), None):
        print(f"\nnote: {item.text()}")


if __name__ == "__main__":
    run_main(main)
