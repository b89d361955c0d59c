#!/usr/bin/env python3
"""Show some samples of each source as the model sees them: pictures, text with its label spans, token counts.

Prints a summary, writes samples.html to --output-dir, and ends with status 1 when a vision token carries a
label, an image record has no vision tensor, or token counts do not agree.

    python workflow_scripts/inspect_samples.py --data data/mm-mix-tmdb --model Qwen/Qwen3-VL-2B-Instruct \\
        --output-dir outputs/check/samples
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from odb_workflow.runtime.errors import UserError, combine_errors, run_main

CODE_VERSION = 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="folder with metadata.json, records.jsonl and the images")
    add("--model", required=True, help="model whose processor makes the samples: folder or hub id")
    add("--output-dir", type=Path, required=True, help="folder for samples.html")
    add("--validation", help="folder that validate_tmdb.py wrote: take accepted records only")
    add("--max-length", type=int, default=16384, help="largest number of tokens of a sample")
    add("--image-max-pixels", type=int, default=589824, help="upper bound of an image's pixels, 0: as saved")
    add("--per-source", type=int, default=3, help="samples of each source")
    add("--ids", default="", help="show these record ids instead, separated by commas")
    add("--seed", type=int, default=42, help="which samples are drawn")
    add("--revision", help="hub id: branch, tag or commit")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return parser.parse_args(argv)


def choose_rows(arguments: argparse.Namespace, store) -> list[tuple[str, list[int]]]:
    """The rows to show of each source, without reading more of the file than needed to know the sources."""
    from odb_workflow.processing.choose import rows_by_source, rows_of_ids
    from odb_workflow.tmdb.accepted import AcceptedSet

    accepted = AcceptedSet.load(arguments.validation) if arguments.validation else None
    if accepted is not None:
        accepted.check_store(store)
    if arguments.ids:
        return rows_of_ids(store, accepted, [name for name in arguments.ids.split(",") if name])
    if arguments.per_source < 1:
        raise UserError(f"--per-source is {arguments.per_source}, it must be at least 1")
    return rows_by_source(store, accepted, arguments.per_source, arguments.seed)


def main() -> None:
    """Inspect; see the module's docstring."""
    arguments = parse_arguments()
    from odb_workflow.model.load import load_processor
    from odb_workflow.processing.inspect import inspect_sample
    from odb_workflow.processing.sample import SampleProcessor
    from odb_workflow.runtime.files import atomic_write_text
    from odb_workflow.runtime.log import setup_logging
    from odb_workflow.tmdb.pages import inspection_page
    from odb_workflow.tmdb.records import BadRecord
    from odb_workflow.tmdb.store import RecordStore

    setup_logging()
    store = RecordStore(arguments.data)
    processor = load_processor(
        arguments.model,
        arguments.image_max_pixels or None,
        trust_remote_code=arguments.trust_remote_code,
        revision=arguments.revision,
    )
    samples = SampleProcessor(processor, arguments.max_length, arguments.data, check_template=True)
    groups, problems = [], []
    print(f"{'source':28} {'id':32} {'tokens':>7} {'labels':>7} {'image':>7} {'images':>6}  check")
    for source, rows in choose_rows(arguments, store):
        shown = []
        for row in rows:
            try:
                inspection = inspect_sample(samples, store[row], row)
            except BadRecord as error:
                problems.append(f"row {row}, {error.record_id}: {error.reason}: {error.detail}")
                print(f"{source[:28]:28} {error.record_id[:32]:32} {'':31}  {error.reason}")
                continue
            shown.append(inspection)
            name, found = inspection.record.id, inspection.problems
            problems += [f"row {row}, {name}: {problem}" for problem in found]
            print(
                f"{source[:28]:28} {name[:32]:32} {inspection.tokens:7} {inspection.label_tokens:7} "
                f"{inspection.image_tokens:7} {len(inspection.record.images):6}  {'; '.join(found) or 'ok'}"
            )
        groups.append((source, shown))
    page = arguments.output_dir / "samples.html"
    atomic_write_text(page, inspection_page(str(arguments.data), groups, problems))
    print(f"wrote {page}")
    if problems:
        raise combine_errors(problems, f"{len(problems)} samples are not sound, {page} shows them")


if __name__ == "__main__":
    run_main(main)
