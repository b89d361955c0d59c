#!/usr/bin/env python3
"""Write beside a training what it comes from: settings, configuration, code, versions, data, time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from odb_workflow.config.load import check
from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.files import atomic_write_json
from odb_workflow.runtime.provenance import provenance
from odb_workflow.workflow.records import training_settings


def json_or_none(path: Path) -> Any:
    """A JSON file's content; None where it is absent, since a run may skip the stage that writes it."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="file to write; what it holds is kept")
    parser.add_argument("--arm", required=True, help="the arm that was trained")
    parser.add_argument("--seed", type=int, required=True, help="its seed")
    parser.add_argument("--config", required=True, help="JSON: what differs from the schema's defaults")
    parser.add_argument("--include", action="append", default=[], metavar="NAME=FILE", help="JSON to copy in")
    options = parser.parse_args()
    try:
        config = check(json.loads(options.config))
    except json.JSONDecodeError as error:
        raise UserError(f"--config is not JSON: {error}") from None
    record = {
        "format": 1,
        "arm": options.arm,
        "seed": options.seed,
        "settings": training_settings(config, options.arm),
        "config": config.model_dump(mode="json"),
        "provenance": provenance(),
    }
    for item in options.include:
        name, _, path = item.partition("=")
        record[name] = json_or_none(Path(path))
    before = json_or_none(options.output)
    atomic_write_json(options.output, {**(before if isinstance(before, dict) else {}), **record})


if __name__ == "__main__":
    run_main(main)
