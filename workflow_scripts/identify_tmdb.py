#!/usr/bin/env python3
"""Write the identity of a TMDB: number of records and checksums, nothing that changes when an equal one is
rebuilt."""

from __future__ import annotations

import argparse
from pathlib import Path

from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.files import atomic_write_json, read_json, sha256_file

CODE_VERSION = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the TMDB")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    records = options.data / "records.jsonl"
    if not records.is_file():
        raise UserError(
            "not a TMDB: records.jsonl is missing",
            where=str(options.data),
            fix="set data.dir (ODB_MM_MIX_DATA) to a TMDB, or choose a builder",
        )
    metadata = read_json(options.data / "metadata.json")
    if not isinstance(metadata, dict):
        raise UserError("metadata.json holds no object", where=str(options.data / "metadata.json"))
    atomic_write_json(
        options.output,
        {
            "num_records": metadata.get("num_records"),
            "checksum": metadata.get("checksum"),
            "records_sha256": sha256_file(records),
        },
    )


if __name__ == "__main__":
    run_main(main)
