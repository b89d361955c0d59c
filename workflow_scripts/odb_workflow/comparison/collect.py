"""Read the finished results of a run: one folder per arm (or per arm and seed), each file optional.

Inputs (all relative to the folder of an arm): ``train_summary_ARM.json``, ``step_log.jsonl``,
``eval_out_accelerate_valloss/{eval_results.json,per_sample_losses.jsonl}``,
``mmmu_mc_likelihood_accelerate/{mmmu_mc_likelihood_results.json,predictions.jsonl,excluded.jsonl}``,
``run_record.json``. What is absent or unreadable is noted with the reason, never invented.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from odb_workflow.runtime.errors import UserError

VALLOSS_FOLDER = "eval_out_accelerate_valloss"
MMMU_FOLDER = "mmmu_mc_likelihood_accelerate"
UNTRAINED = "untrained"
_SEED_FOLDER = re.compile(r"seed-(\d+)$")


@dataclass
class Note:
    """A result that is absent or unreadable, and why."""

    arm: str
    seed: int | None
    stage: str
    path: str
    reason: str


@dataclass
class RunResult:
    """The files of one training (or of the untrained baseline).

    Attributes:
        arm: Name of the arm.
        seed: Training seed where the arm has several; None otherwise.
        folder: Folder that was read.
        summary: Training summary.
        steps: Step log, one row per optimizer step.
        validation: Validation-loss results.
        losses: Per-sample losses, one row per validation record; columns ``key``, ``source``, ``loss``
            (mean over label tokens), ``loss_sum``, ``label_tokens``.
        benchmark: MMMU-MC results.
        predictions: One row per scored question; columns ``key``, ``subject``, ``category``, ``correct``,
            ``chance``.
        excluded: Excluded questions per reason.
        record: Provenance and merged config written by the training.
        notes: What is missing, with the reason.
    """

    arm: str
    seed: int | None
    folder: Path
    summary: dict[str, Any] | None = None
    steps: pd.DataFrame | None = None
    validation: dict[str, Any] | None = None
    losses: pd.DataFrame | None = None
    benchmark: dict[str, Any] | None = None
    predictions: pd.DataFrame | None = None
    excluded: dict[str, int] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    notes: list[Note] = field(default_factory=list)

    @property
    def trained(self) -> bool:
        """False for the untrained baseline, which has no training metrics by design."""
        return self.arm != UNTRAINED

    @property
    def empty(self) -> bool:
        """True when no result file at all was found."""
        return self.summary is None and self.validation is None and self.benchmark is None


@dataclass
class ArmResult:
    """All runs (seeds) of one arm."""

    name: str
    runs: list[RunResult]

    @property
    def notes(self) -> list[Note]:
        """Notes of all seeds."""
        return [note for run in self.runs for note in run.notes]

    @property
    def empty(self) -> bool:
        """True when no seed has a result."""
        return all(run.empty for run in self.runs)

    def first(self, attribute: str) -> Any:
        """The attribute of the first seed that has it."""
        return next((value for run in self.runs if (value := getattr(run, attribute)) is not None), None)


def _read(run: RunResult, stage: str, path: Path, lines: bool = False) -> Any:
    """Parse a JSON or JSON-lines file; a fault becomes a note and None."""
    try:
        text = path.read_text(encoding="utf-8")
        value = [json.loads(line) for line in text.split("\n") if line.strip()] if lines else json.loads(text)
    except FileNotFoundError:
        run.notes.append(Note(run.arm, run.seed, stage, str(path), "no result: this stage has not been run"))
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        run.notes.append(Note(run.arm, run.seed, stage, str(path), f"not readable: {error}"))
        return None
    if not lines and not isinstance(value, dict):
        run.notes.append(Note(run.arm, run.seed, stage, str(path), "not a JSON object"))
        return None
    return value


def _first_column(table: pd.DataFrame, *names: str) -> pd.Series | None:
    return next((table[name] for name in names if name in table), None)


def normalize_losses(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Per-sample losses with columns ``key``, ``source``, ``loss``, ``loss_sum``, ``label_tokens``.

    Raises:
        UserError: a needed field is absent.
    """
    raw = pd.DataFrame(list(rows))
    key = _first_column(raw, "id", "row")
    tokens = _first_column(raw, "label_tokens")
    mean, total = _first_column(raw, "loss"), _first_column(raw, "loss_sum")
    if key is None or tokens is None or (mean is None and total is None):
        raise UserError("per-sample losses need id, label_tokens and loss (or loss_sum)")
    tokens = tokens.astype(float)
    mean = total.astype(float) / tokens if mean is None else mean.astype(float)
    total = mean * tokens if total is None else total.astype(float)
    source = _first_column(raw, "source")
    return pd.DataFrame(
        {
            "key": key.astype(str),
            "source": "all" if source is None else source.astype(str),
            "loss": mean,
            "loss_sum": total,
            "label_tokens": tokens,
        }
    )


def normalize_predictions(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Scored questions as a table with columns ``key``, ``subject``, ``category``, ``correct``, ``chance``.

    Raises:
        UserError: neither ``correct`` nor the pair of answer and prediction is there, or no id.
    """
    raw = pd.DataFrame(list(rows))
    key = _first_column(raw, "id")
    answer, prediction = _first_column(raw, "ground_truth", "answer"), _first_column(raw, "prediction")
    correct = _first_column(raw, "correct")
    if key is None or (correct is None and (answer is None or prediction is None)):
        raise UserError("predictions need id and correct (or answer and prediction)")
    subject, category = _first_column(raw, "subject"), _first_column(raw, "category")
    options = _first_column(raw, "valid_candidate_letters", "options")
    counts = None
    if options is not None:
        counts = options.map(lambda item: len(item) if isinstance(item, (list, dict)) else item)
        counts = pd.to_numeric(counts, errors="coerce")
    return pd.DataFrame(
        {
            "key": key.astype(str) if subject is None else subject.astype(str) + "/" + key.astype(str),
            "subject": "all" if subject is None else subject.astype(str),
            "category": "all" if category is None else category.astype(str),
            "correct": (answer == prediction) if correct is None else correct.astype(bool),
            "chance": float("nan") if counts is None else 1.0 / counts.where(counts > 0),
        }
    )


def _table(run: RunResult, stage: str, path: Path, normalize: Any) -> pd.DataFrame | None:
    rows = _read(run, stage, path, lines=True)
    if not rows:
        return None
    try:
        table = normalize(rows)
    except UserError as error:
        run.notes.append(Note(run.arm, run.seed, stage, str(path), error.what))
        return None
    if table["key"].duplicated().any():
        twice = table.loc[table["key"].duplicated(), "key"].iloc[0]
        run.notes.append(Note(run.arm, run.seed, stage, str(path), f"{twice} stands twice: rows not used"))
        return None
    return table


def collect_run(arm: str, seed: int | None, folder: Path) -> RunResult:
    """Read the result files of one folder."""
    run = RunResult(arm, seed, folder)
    if run.trained:
        run.summary = _read(run, "training", folder / f"train_summary_{arm}.json")
        if run.summary is not None:
            rows = _read(run, "training", folder / "step_log.jsonl", lines=True)
            run.steps = pd.DataFrame(rows) if rows else None
            if (folder / "run_record.json").is_file():
                run.record = _read(run, "training", folder / "run_record.json")
    validation = folder / VALLOSS_FOLDER
    run.validation = _read(run, "validation", validation / "eval_results.json")
    if run.validation is not None:
        path = validation / "per_sample_losses.jsonl"
        run.losses = _table(run, "validation", path, normalize_losses)
    benchmark = folder / MMMU_FOLDER
    run.benchmark = _read(run, "benchmark", benchmark / "mmmu_mc_likelihood_results.json")
    if run.benchmark is not None:
        run.predictions = _table(run, "benchmark", benchmark / "predictions.jsonl", normalize_predictions)
        if (benchmark / "excluded.jsonl").is_file():
            for row in _read(run, "benchmark", benchmark / "excluded.jsonl", lines=True) or []:
                reason = str(row.get("reason", "no reason given"))
                run.excluded[reason] = run.excluded.get(reason, 0) + 1
    return run


def collect_arm(arms_root: Path, arm: str, seeds: Sequence[int] | None = None) -> ArmResult:
    """Read an arm: its own folder, or its ``seed-N`` folders where the run has several seeds.

    Args:
        arms_root: Folder that holds the arms.
        arm: Name of the arm.
        seeds: Seeds of the config when there are several; by default the folders that exist.
    """
    folder = arms_root / arm
    found = sorted(
        int(match.group(1))
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and (match := _SEED_FOLDER.match(path.name))
    )
    several = list(seeds) if seeds and len(seeds) > 1 else found
    has_own = (folder / f"train_summary_{arm}.json").is_file()
    if several and arm != UNTRAINED and not (has_own and not seeds):
        return ArmResult(arm, [collect_run(arm, seed, folder / f"seed-{seed}") for seed in several])
    return ArmResult(arm, [collect_run(arm, None, folder)])


def collect_data(arms_root: Path) -> dict[str, Any] | None:
    """Records, accepted and rejected ones per source and reason; None where nothing was checked here."""
    path = arms_root / "tmdb_validation" / "validation.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            "records": found["records"],
            "accepted": found["accepted"],
            "rejected": found["rejected"],
            "rejected_by_reason": found.get("rejected_by_reason", {}),
            "rejected_by_source": {
                source: {"rejected": counts["rejected"], "reasons": counts.get("reasons", {})}
                for source, counts in found.get("by_source", {}).items()
                if counts.get("rejected")
            },
            "data_checksum": found.get("data_checksum"),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def collect_lengths(arms_root: Path) -> pd.DataFrame | None:
    """Lengths of the accepted records (columns ``source``, ``length``), or None where the file is absent."""
    path = arms_root / "tmdb_validation" / "accepted.parquet"
    if not path.is_file():
        return None
    table = pd.read_parquet(path)
    length = _first_column(table, "length")
    if length is None:
        return None
    source = _first_column(table, "source")
    return pd.DataFrame({"source": "all" if source is None else source.astype(str), "length": length})
