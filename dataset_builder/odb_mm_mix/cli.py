"""Command line: the upstream builder's ``--output DIR --overwrite``, plus sizes and seed."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from .mix import DEFAULT_SIZES, SOURCES, items, scaled_sizes
from .writer import write_tmdb


def parse_sizes(text: str) -> dict[str, int]:
    """Records per source from ``4000``, ``{"total": 4000}`` or ``{"vqa_like": 2000}``.

    Sources that are not named keep their default.

    Raises:
        ValueError: not a number, not a JSON object, an unknown source, or a negative count.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--sizes is neither a number nor JSON: {text!r} ({error})") from None
    if isinstance(value, dict) and set(value) == {"total"}:
        value = value["total"]
    if isinstance(value, int) and not isinstance(value, bool):
        if value < len(SOURCES):
            raise ValueError(f"--sizes {value}: at least {len(SOURCES)} records, one a source")
        return scaled_sizes(value)
    if not isinstance(value, dict):
        raise ValueError(f"--sizes must be a number or an object of source: count, not {text!r}")
    for name, count in value.items():
        if name not in SOURCES:
            raise ValueError(f"--sizes names an unknown source {name!r}; known: {', '.join(SOURCES)}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(
                f"--sizes: the count of {name!r} must be a whole number of at least 0, not {count!r}"
            )
    return {**DEFAULT_SIZES, **value}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build_public_mm_mix.py", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the TMDB")
    parser.add_argument("--overwrite", action="store_true", help="replace a TMDB that stands there")
    parser.add_argument(
        "--sizes",
        default="{}",
        help="records per source as JSON, or one total; default: " + json.dumps(DEFAULT_SIZES),
    )
    parser.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Build; returns 0, or 1 after a message on stderr."""
    # SIGTERM becomes an exception, so that the working folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = build_parser().parse_args(arguments)
    try:
        sizes = parse_sizes(options.sizes)
        metadata = write_tmdb(
            items(sizes, options.seed), options.output, seed=options.seed, overwrite=options.overwrite
        )
    except FileExistsError as error:
        print(f"error: {error}; add --overwrite to replace it", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{metadata['num_records']} records, checksum {metadata['checksum']} -> {options.output}")
    return 0
