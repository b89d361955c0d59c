#!/usr/bin/env python3
"""Build the TMDB by a builder in a checkout (embedded, git), from data sets (hub) or from JSON files (json).

The folder appears whole or not at all, and takes the place of nothing but an earlier build.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.files import atomic_directory
from odb_workflow.runtime.lock import folder_lock
from odb_workflow.runtime.log import setup_logging
from odb_workflow.tmdb.builders.program import (
    BUILT_MARKER,
    check_contract,
    foreign_folder_fault,
    no_space,
    run_builder_program,
)

CODE_VERSION = 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["embedded", "git", "hub", "json"], required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder of the TMDB")
    parser.add_argument("--checkout", type=Path, help="embedded, git: folder of the builder")
    parser.add_argument("--sources", type=Path, help="hub, json: YAML file that lists the sources")
    parser.add_argument("--sources-sha256", help="ignored; lets the caller name the content of --sources")
    parser.add_argument("--sizes", help='records per source as JSON, or {"total": N}')
    parser.add_argument("--seed", type=int, help="embedded: seed of the data")
    parser.add_argument("--builder-args", default="[]", help="JSON list passed to the builder as it is")
    return parser.parse_args()


def builder_arguments(options: argparse.Namespace) -> list[str]:
    """Command line of the builder program: sizes and seed where given, then ``--builder-args``."""
    arguments: list[str] = []
    if options.sizes:
        sizes = json.loads(options.sizes)
        total = sizes.get("total") if isinstance(sizes, dict) else sizes
        arguments += ["--sizes", json.dumps(sizes if total is None else total)]
    if options.seed is not None:
        arguments += ["--seed", str(options.seed)]
    extra = json.loads(options.builder_args)
    if not isinstance(extra, list):
        raise UserError("--builder-args is not a JSON list", where="builder.args", fix="write it as a list")
    return [*arguments, *map(str, extra)]


def build(options: argparse.Namespace, folder: Path) -> None:
    """Fill ``folder`` with a TMDB."""
    if options.kind in ("embedded", "git"):
        if options.checkout is None:
            raise UserError(f"--kind {options.kind} needs --checkout")
        run_builder_program(options.checkout, folder, builder_arguments(options), options.kind == "git")
        return
    if options.sources is None:
        raise UserError(
            f"builder.kind: {options.kind} needs a list of sources", where="builder.sources", fix="set it"
        )
    if options.kind == "hub":
        from odb_workflow.tmdb.builders.hub import build_from_datasets as build_from
    else:
        from odb_workflow.tmdb.builders.json_files import build_from_json as build_from
    build_from(options.sources, folder)


@contextlib.contextmanager
def user_names(folder: Path, output: Path) -> Iterator[None]:
    """Errors name the folder that the user knows in place of the one that is gone after a failed build."""
    shown = f"{output} (the new build, removed; what stood there is unchanged)"
    try:
        yield
    except UserError as error:
        what, where = (text and text.replace(str(folder), str(output)) for text in (error.what, error.where))
        if error.where and error.where.startswith(str(folder)):
            where = shown.replace(str(output), str(where), 1)
        raise UserError(what, where=where, fix=error.fix) from error


def remove_leftovers(output: Path) -> None:
    """Delete what killed builds of the same output left; the lock says that none is running."""
    for pattern in (f".{output.name}.*.part", f".{output.name}.*.old"):
        for folder in output.parent.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    options = parse_arguments()
    setup_logging()
    if fault := foreign_folder_fault(options.output):
        raise UserError(fault)
    output = Path(os.path.realpath(options.output))  # a link stays, the folder behind it is replaced
    output.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(output.parent / f".{output.name}.build", "a build of the TMDB"):
        remove_leftovers(output)
        try:
            with atomic_directory(output) as folder, user_names(folder, options.output):
                build(options, folder)
                metadata = check_contract(folder)
                (folder / BUILT_MARKER).write_text(
                    "the next build takes the place of this folder\n", encoding="utf-8"
                )
        except OSError as error:
            raise no_space(error, output.parent) from error
    print(f"{metadata['num_records']} records in {options.output}")


if __name__ == "__main__":
    run_main(main)
