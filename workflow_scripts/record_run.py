#!/usr/bin/env python3
"""Write beside a result where it comes from: settings, merged configuration, code, versions, data, times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.files import atomic_write_json
from odb_workflow.runtime.provenance import provenance


def _json_or_none(path: Path) -> Any:
    """A JSON file's content; None where it is absent, since a run may skip the stage that writes it."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--record", required=True, help="JSON made by the workflow: settings and configuration"
    )
    parser.add_argument(
        "--include", action="append", default=[], metavar="NAME=FILE", help="JSON file to copy in"
    )
    options = parser.parse_args()
    try:
        record = json.loads(options.record)
    except json.JSONDecodeError as error:
        raise UserError(f"--record is not JSON: {error}") from None
    for item in options.include:
        name, _, path = item.partition("=")
        record[name] = _json_or_none(Path(path))
    atomic_write_json(options.output, {"format": 1, **record, "provenance": provenance()})


if __name__ == "__main__":
    run_main(main)
