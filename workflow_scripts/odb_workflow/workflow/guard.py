"""Never lose a training to a forgotten variable.

A finished training has a record beside it (``run_record.json``). Before anything runs, the present settings
are compared
with it. `run.sh` stops where an evaluation would train again; plain `snakemake` prints the same list and
goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.environment import nested
from ..config.load import Layers
from ..config.schema import Config
from ..runtime.errors import UserError
from ..runtime.files import atomic_write_json
from .paths import Paths
from .records import Difference, difference_table, differences, read_record, training_settings

MODE_VARIABLE = "ODB_WORKFLOW_GUARD"
MODES = ("tell", "stop", "recorded", "retrain")
LAST_RUN = Path(".snakemake") / "odb_last_run.json"


@dataclass(frozen=True)
class Finding:
    """A finished training that the present settings would not make."""

    arm: str
    folder: str
    record: Mapping[str, Any]
    found: list[Difference]
    elsewhere: bool

    def text(self) -> str:
        """The finding with its table."""
        head = f"the finished training in {self.folder} was made with other settings:"
        if self.elsewhere:
            head = (
                f"there is no finished training of `{self.arm}` here, but one in {self.folder}, "
                "made with other settings:"
            )
        return f"{head}\n{difference_table(self.found)}"


def guard_mode(environment: Mapping[str, str] | None = None) -> str:
    """How to treat differences: ``tell`` for plain Snakemake, else what `run.sh` asks for."""
    mode = (os.environ if environment is None else environment).get(MODE_VARIABLE, "tell")
    if mode not in MODES:
        raise UserError(f"{MODE_VARIABLE}={mode!r} is not one of {', '.join(MODES)}")
    return mode


def needed_arms(targets: Sequence[str], arms: Sequence[str], evaluated: str) -> list[str]:
    """Arms whose training a target needs; ``evaluated`` is what `eval_valloss` and `benchmark` are about."""
    needed: list[str] = []
    for target in targets or ["all"]:
        if target in {"eval_valloss", "benchmark"}:
            needed.append(evaluated)
        elif target in {"all", "comparison", "report"}:
            needed += arms
        else:
            needed += [arm for arm in arms if target in {f"train_{arm}", f"eval_{arm}", f"all_{arm}"}]
    return [arm for arm in dict.fromkeys(needed) if arm in arms]


def findings(config: Config, arms: Iterable[str], last_run: str | None) -> list[Finding]:
    """Finished trainings of ``arms``, here or in the last run's folder, that differ from the present
    settings."""
    paths = Paths(config)
    result = []
    for arm in arms:
        present = training_settings(config, arm)
        for folder, elsewhere in _folders(paths, arm, last_run):
            record = read_record(folder)
            if record is None:
                continue
            found = differences(record["settings"], present)
            if len(config.training_seeds) > 1:
                found = [item for item in found if item.key != "training.seed"]
            if found:
                result.append(Finding(arm, folder, record, found, elsewhere))
            break
    return result


DATA_KEYS = ("model.", "builder.", "data.", "split.")
"""Settings that decide what a checkpoint is evaluated on."""


def checkpoint_findings(config: Config) -> list[Finding]:
    """The same for a checkpoint of another run that ODB_ACCEL_EVAL_CHECKPOINT names."""
    named = config.evaluation.checkpoint
    if not named:
        return []
    for folder in (Path(named), Path(named).parent):
        record = read_record(folder)
        if record is None:
            continue
        arm = str(record.get("arm"))
        present = training_settings(config, arm)
        found = [d for d in differences(record["settings"], present) if d.key.startswith(DATA_KEYS)]
        return [Finding(arm, str(folder), record, found, False)] if found else []
    return []


def _folders(paths: Paths, arm: str, last_run: str | None) -> list[tuple[str, bool]]:
    places = [(f"{paths.output}/{arm}/{part}".rstrip("/"), False) for part in paths.seed_parts(arm)]
    if last_run and os.path.realpath(last_run) != os.path.realpath(paths.output):
        places.append((f"{last_run.rstrip('/')}/{arm}", True))
    return places


def read_last_run(file: Path = LAST_RUN) -> str | None:
    """Output folder of the last run that trained, or None."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value.get("output_root") if isinstance(value, dict) else None


def write_last_run(output_root: str, file: Path = LAST_RUN) -> None:
    """Remember where this run's outputs are."""
    if read_last_run(file) != output_root:
        atomic_write_json(file, {"output_root": output_root})


def guard_error(found: Sequence[Finding]) -> UserError | None:
    """The error that stops an evaluation, or None where nothing differs."""
    if not found:
        return None
    return UserError(
        "this command would not use what was trained.\n" + "\n".join(item.text() for item in found),
        fix="--recorded takes the recorded settings; --retrain trains again with the present ones; or set "
        "the "
        "variables as in the first command",
    )


def other_model_error(config: Config, arms: Iterable[str]) -> UserError | None:
    """An error where a folder of this run holds the training of another model; such a folder is never
    overwritten."""
    paths = Paths(config)
    for arm in arms:
        for part in paths.seed_parts(arm):
            folder = f"{paths.output}/{arm}/{part}".rstrip("/")
            record = read_record(folder)
            model = record["settings"].get("model.path") if record else None
            if model is not None and model != config.model.path:
                return UserError(
                    f"{folder} holds a training of the model {model!r}; the present one is "
                    f"{config.model.path!r}",
                    where=folder,
                    fix="choose another `run` (or ODB_MM_MIX_OUTPUT_ROOT), or move that folder away",
                )
    return None


def recorded_layers(found: Sequence[Finding]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(merged configuration, settings that win over everything) of the recorded trainings.

    Raises:
        UserError: the records contradict each other.
    """
    settings: dict[str, Any] = {}
    for item in found:
        for key, value in item.record["settings"].items():
            if key in settings and settings[key] != value:
                raise UserError(
                    f"the recorded trainings differ in `{key}`: {settings[key]!r} and {value!r}",
                    where=item.folder,
                    fix="evaluate one arm at a time, or set the variables yourself",
                )
            settings[key] = value
    layers = Layers()
    for key, value in settings.items():
        layers.add(nested(key, value), "recorded")
    return dict(found[0].record.get("config") or {}), layers.values
