#!/usr/bin/env python3
"""Prepare the base model: make the embedded one from the text of the TMDB, or check a given one.

Writes model.json (identity), untrained/checkpoint.json (the base model as a checkpoint), and for the embedded
model base_model/, all below --output-dir.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odb_workflow.model.identity import (
    check_remote_code,
    hub_model_identity,
    local_model_identity,
    looks_like_hub_id,
)
from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.files import atomic_write_json, iter_lines
from odb_workflow.runtime.log import setup_logging
from odb_workflow.runtime.provenance import without_home

CODE_VERSION = 1
# Words of the protocols' prompts, so that the embedded tokenizer has seen their characters.
PROMPT_TEXT = (
    "system\nuser\nassistant\nAnswer with the option letter only.\n(A) (B) (C) (D) (E) (F) (G) (H)\n"
)


def records_of(data: Path) -> Path:
    """The records file of a TMDB.

    Raises:
        UserError: there is none.
    """
    records = data / "records.jsonl"
    if not records.is_file():
        raise UserError(
            "no TMDB to train the embedded tokenizer on", where=str(records), fix="build it first"
        )
    return records


def texts_of(data: Path) -> Iterator[str]:
    """Texts of a TMDB's turns without image markers, then the protocols' own words."""
    for _, line in iter_lines(records_of(data)):
        try:
            record = json.loads(line) if line.strip() else {}
            turns = record.get("conversations") or record.get("conversation") or []
            values = [turn.get("value") for turn in turns]
        except (ValueError, AttributeError, TypeError, RecursionError):
            # the validation pass lists every broken record; the tokenizer needs only the readable ones
            continue
        # half a surrogate pair is a fault that the validation names; the tokenizer's training cannot take it
        yield from (
            value.replace("<image>", "").encode("utf-8", "ignore").decode()
            for value in values
            if isinstance(value, str)
        )
    yield PROMPT_TEXT


def prepare_embedded(data: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Make the embedded model in ``folder`` and return its identity."""
    from odb_workflow.model.embedded import build_embedded_model

    made = build_embedded_model(texts_of(data), folder, seed=seed)
    return {"path": "embedded", **made, **local_model_identity(folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="embedded, a Hugging Face folder, or a Hub id")
    parser.add_argument("--revision", help="Hub: branch, tag or commit")
    parser.add_argument("--seed", type=int, default=42, help="embedded: seed of the weights")
    parser.add_argument("--data", type=Path, help="embedded: TMDB whose text the tokenizer is trained on")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    options = parser.parse_args()
    setup_logging()
    if options.model == "embedded":
        if options.data is None:
            raise UserError("--model embedded needs --data")
        records_of(options.data)
        place = str(options.output_dir / "base_model")
        identity = prepare_embedded(options.data, Path(place), options.seed)
    elif Path(options.model).exists() or not looks_like_hub_id(options.model):
        place = options.model
        identity = {"path": without_home(place), **local_model_identity(Path(place))}
        check_remote_code(Path(place) / "config.json", options.trust_remote_code, place)
    else:
        place = options.model
        identity = {
            "path": place,
            "revision": options.revision,
            **hub_model_identity(place, options.revision),
        }
    untrained = options.output_dir / "untrained"
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    model_dir = os.path.relpath(place, untrained) if Path(place).is_dir() else place
    atomic_write_json(
        untrained / "checkpoint.json",
        {
            "format": 1,
            "model_dir": model_dir,
            "files": [],
            "sha256": digest,
            "base_model": place,
            "revision": identity.get("revision"),
            "arm": "untrained",
            "saved": True,
        },
    )
    atomic_write_json(options.output_dir / "model.json", identity)
    print(f"base model {identity['path']}: {identity['model_type']}")


if __name__ == "__main__":
    run_main(main)
