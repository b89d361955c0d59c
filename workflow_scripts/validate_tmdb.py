#!/usr/bin/env python3
"""Check every record of a TMDB and measure its length under the model's processor.

Decodes every image, finds every fault in one pass, and writes accepted.parquet, rejects.jsonl and, last,
validation.json to --output-dir. When it stops, --output-dir/validation_failed/ lists the faults
(rejects.jsonl, report.html).

    python workflow_scripts/validate_tmdb.py --data data/mm-mix-tmdb --model Qwen/Qwen3-VL-2B-Instruct \\
        --max-length 16384 --image-max-pixels 589824 --output-dir outputs/check
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the pool is the parallelism

from odb_workflow.runtime.errors import run_main

CODE_VERSION = 2


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="folder with metadata.json, records.jsonl and the images")
    add("--model", required=True, help="model whose processor measures the samples: folder or hub id")
    add("--output-dir", required=True, help="folder for the results")
    add("--max-length", type=int, default=16384, help="largest number of tokens of a sample")
    add("--image-max-pixels", type=int, default=589824, help="upper bound of an image's pixels, 0: as saved")
    add("--on-bad-record", choices=["error", "drop"], default="error", help="what a faulty record leads to")
    add("--max-bad-fraction", type=float, default=0.05, help="with drop: largest share of faulty records")
    add("--workers", type=int, default=0, help="processes, 0: as many as there are CPUs")
    add("--revision", help="hub id: branch, tag or commit")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return parser.parse_args(argv)


def main() -> None:
    """Validate; see the module's docstring."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that worker processes are ended
    from odb_workflow.model.load import load_processor
    from odb_workflow.runtime.lock import folder_lock
    from odb_workflow.runtime.log import setup_logging
    from odb_workflow.tmdb.validate import validate_tmdb

    setup_logging()
    with folder_lock(arguments.output_dir, "the validation of a TMDB"):
        validate_tmdb(
            arguments.data,
            load_processor(
                arguments.model,
                arguments.image_max_pixels or None,
                trust_remote_code=arguments.trust_remote_code,
                revision=arguments.revision,
            ),
            max_length=arguments.max_length,
            output_dir=arguments.output_dir,
            on_bad_record=arguments.on_bad_record,
            max_bad_fraction=arguments.max_bad_fraction,
            processes=arguments.workers or None,
            code_version=CODE_VERSION,
        )


if __name__ == "__main__":
    run_main(main)
