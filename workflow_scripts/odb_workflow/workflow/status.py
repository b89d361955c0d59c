"""What is finished in a run's folder, made by which code and with which settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .code_version import code_version
from .paths import MMMU_DIR, VALLOSS_DIR
from .places import PROGRAMS
from .records import RECORD

RESULTS = {
    "train": "train_summary_{arm}.json",
    "valloss": f"{VALLOSS_DIR}/eval_results.json",
    "mmmu": f"{MMMU_DIR}/mmmu_mc_likelihood_results.json",
}


@dataclass(frozen=True)
class Stage:
    """One stage of one arm."""

    arm: str
    stage: str
    file: Path
    finished: bool
    made_by: int | None
    present: int
    commit: str | None

    @property
    def other_code(self) -> bool:
        """Made by another code version than the present one."""
        return self.finished and self.made_by is not None and self.made_by != self.present


def read_json_or_none(path: Path) -> Any:
    """A JSON file, or None where it is absent or broken: a status must never fail on a half-finished run."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def checkpoint_fault(file: Path) -> str | None:
    """What of a saved model is not as its ``checkpoint.json`` says, by names and sizes; None: all is."""
    record = read_json_or_none(file)
    if not isinstance(record, dict) or not record.get("saved"):
        return None
    for entry in record.get("files") or []:
        path = file.parent / record["model_dir"] / entry["path"]
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            state = "is missing" if size is None else f"has {size} bytes"
            return (
                f"{path} {state}, {file} says {entry['bytes']} bytes: put the file back, or delete {file} "
                "to train this arm again"
            )
    return None


def arm_folders(output: Path) -> Iterator[tuple[str, Path]]:
    """(name, folder) of each arm and seed below a run's folder."""
    for folder in sorted(path for path in output.iterdir() if path.is_dir()) if output.is_dir() else ():
        seeds = sorted(folder.glob("seed-*"))
        for place in seeds or [folder]:
            if any(_result(place, folder.name, stage).is_file() for stage in RESULTS):
                yield (f"{folder.name}/{place.name}" if seeds else folder.name), place


def _result(folder: Path, arm: str, stage: str) -> Path:
    return folder / RESULTS[stage].format(arm=arm)


def stages(output: Path, scripts: Path) -> list[Stage]:
    """All stages of all arms below a run's folder."""
    found = []
    for name, folder in arm_folders(output):
        for stage in RESULTS:
            if stage == "train" and name == "untrained":
                continue
            file = _result(folder, name.split("/")[0], stage)
            content = read_json_or_none(file)
            values = content if isinstance(content, dict) else {}
            found.append(
                Stage(
                    arm=name,
                    stage=stage,
                    file=file,
                    finished=content is not None,
                    made_by=values.get("code_version"),
                    present=code_version(scripts / PROGRAMS[stage]),
                    commit=_commit(file, values),
                )
            )
    return found


def _commit(file: Path, values: dict[str, Any]) -> str | None:
    record = read_json_or_none(file.parent / RECORD) or {}
    provenance = record.get("provenance") or record
    git = provenance.get("git") if isinstance(provenance, dict) else None
    commit = values.get("git_commit") or (git or {}).get("commit")
    return str(commit)[:10] if isinstance(commit, str) else None


def status_text(output: Path, scripts: Path) -> str:
    """The status as a table, with the results that other code made named below it."""
    found = stages(output, scripts)
    if not found:
        return f"{output}: nothing is finished yet"
    rows = [("arm", "stage", "state", "code", "commit")]
    for item in found:
        code = "" if item.made_by is None else str(item.made_by)
        rows.append(
            (item.arm, item.stage, "finished" if item.finished else "missing", code, item.commit or "")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [str(output)]
    lines += [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for item in found:
        if item.other_code:
            lines.append(
                f"note: {item.stage} of {item.arm} was made by code version {item.made_by}, the present one "
                f"is {item.present}; the next run makes it again"
            )
    for name, folder in arm_folders(output):
        if fault := checkpoint_fault(folder / "checkpoint.json"):
            lines.append(f"note: {name}: {fault}")
    return "\n".join(lines)


def records(output: Path, results: Path) -> dict[str, Any]:
    """All provenance records of a run by their path."""
    files = [*sorted(output.rglob(RECORD)), output / "model.json", *sorted(results.glob(RECORD))]
    return {str(file): content for file in files if (content := read_json_or_none(file)) is not None}
