"""Compare the finished arms of a run: comparison.json, .csv, .md, .html and figures.

Reads results only, never trains or evaluates. An arm without results is shown as missing, with the reason.
Exit status: 0 complete, 1 wrong input, 2 a fault of the program, 3 written, but a result is missing or not
finite.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import time
from pathlib import Path
from typing import Any

import yaml
from odb_workflow.comparison.analysis import analyze
from odb_workflow.comparison.collect import collect_arm, collect_data, collect_lengths
from odb_workflow.comparison.draw import draw_all
from odb_workflow.comparison.page import example_records, render
from odb_workflow.comparison.statistics import LEVEL
from odb_workflow.comparison.text_tables import csv_text, markdown_text
from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.files import atomic_write_json, atomic_write_text, dump_json
from odb_workflow.runtime.log import setup_logging

CODE_VERSION = 2
EXIT_INCOMPLETE = 3
REPOSITORY = Path(__file__).resolve().parent.parent

logger = logging.getLogger(__name__)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms-root", type=Path, required=True, help="folder that holds one folder per arm")
    parser.add_argument("--arms", required=True, help="names of the arms, separated by commas")
    parser.add_argument("--reference-arm", required=True, help="arm that the others are compared with")
    parser.add_argument("--config", type=Path, help="merged config (YAML), shown at the end of the page")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the comparison is written")
    parser.add_argument("--run-name", help="name of the run; by default the name of --arms-root")
    parser.add_argument(
        "--level",
        type=float,
        help="coverage of the intervals; by default report.level of the config, else 0.95",
    )
    parser.add_argument(
        "--examples", type=Path, default=REPOSITORY / "results" / "examples", help="folder of example records"
    )
    parser.add_argument(
        "--reproduce",
        help="command shown as the way to make this page again; default: ./run.sh all, the merged config",
    )
    parser.add_argument(
        "--study-command",
        default="./run.sh all --configfile config/batching-study.yaml",
        help="command shown as the way to run the arms left out",
    )
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="exit 0 where results are missing; numbers that are not finite still give 3",
    )
    return parser.parse_args()


def read_config(path: Path | None) -> tuple[str, dict[str, Any]]:
    """Text and content of the merged config; empty where none is given.

    Raises:
        UserError: the file is missing or is not a YAML mapping.
    """
    if path is None:
        return "(no config was given)", {}
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) or {}
    except FileNotFoundError:
        raise UserError("file not found", where=str(path), fix="give the merged config to --config") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"not a readable YAML file: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise UserError("the config is not a mapping", where=str(path))
    return text, content


def reproduce_command(config: Path | None) -> str:
    """One command that makes the page again: the merged config holds every setting of the run."""
    return "./run.sh all" if config is None else f"./run.sh all --configfile {shlex.quote(str(config))}"


def exit_status(problems: list[dict[str, Any]], allow_missing: bool) -> int:
    """0 when the comparison is complete, else 3; with ``allow_missing`` an absent result is no fault."""
    counted = [one for one in problems if not (allow_missing and one["kind"] == "missing")]
    return EXIT_INCOMPLETE if counted else 0


def main() -> int:
    """Collect, analyze, draw, write."""
    arguments = parse_arguments()
    setup_logging()
    started = time.monotonic()
    names = [name for name in arguments.arms.split(",") if name]
    if not names or len(set(names)) != len(names):
        raise UserError(f"--arms needs distinct names, got {arguments.arms!r}", where="--arms")
    config_text, config = read_config(arguments.config)
    level = arguments.level or (config.get("report") or {}).get("level") or LEVEL
    if not 0.5 <= level < 1:
        raise UserError(f"the level must lie in [0.5, 1), got {level}", where="--level, report.level")
    seeds = config.get("seeds")
    arms = [collect_arm(arguments.arms_root, name, seeds) for name in names]
    comparison = analyze(
        arms,
        run=arguments.run_name or arguments.arms_root.name,
        reference=arguments.reference_arm,
        scripts=Path(__file__).resolve().parent,
        study_command=arguments.study_command,
        reproduce_command=arguments.reproduce or reproduce_command(arguments.config),
        data=collect_data(arguments.arms_root),
        level=level,
    )
    output: Path = arguments.output_dir
    output.mkdir(parents=True, exist_ok=True)
    figures = draw_all(comparison, arms, collect_lengths(arguments.arms_root), output / "figures")
    comparison["figures"] = [{key: item[key] for key in ("name", "title", "caption")} for item in figures]
    # Everything else is made from what the JSON file says, so that no output can disagree with it.
    strict = json.loads(dump_json(comparison))
    atomic_write_text(output / "comparison.csv", csv_text(strict))
    atomic_write_text(output / "comparison.md", markdown_text(strict, figures))
    page = render(strict, figures, config_text=config_text, examples=example_records(arguments.examples))
    atomic_write_text(output / "comparison.html", page)
    atomic_write_json(output / "comparison.json", strict)
    logger.info("wrote %s in %.1f s", output / "comparison.html", time.monotonic() - started)
    for answer in strict["answers"]:
        print(f"{answer['arm']} against {answer['reference']}: {answer['faster']}")
        for text in (answer["faster_tokens"], *answer["quality"]):
            print(f"  {text}")
    for problem in strict["problems"]:
        logger.warning("%s: %s %s: %s", problem["arm"], problem["what"], problem["kind"], problem["reason"])
    return exit_status(strict["problems"], arguments.allow_missing)


if __name__ == "__main__":
    run_main(main)
