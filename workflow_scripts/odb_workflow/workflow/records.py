"""What a finished training was made with: the settings that made it, compared with the present ones."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.environment import VARIABLE_OF_KEY
from ..config.load import flatten
from ..config.schema import Config

RECORD = "run_record.json"
IDENTITY = ("run", "device", "output_root", "builder.*", "data.*", "model.*", "split.*", "training.*")
"""Keys that a training's result depends on, besides those of its arm."""
NOT_IDENTITY = (
    "builder.checkout",
    "data.workers",
    "data.source_dir",
    "data.local_dir",
    "model.trust_remote_code",
    "training.master_port",
    "training.num_workers",
    "training.checkpoint_every_*",
    "training.log_with",
    "training.save_final_model",
    "arms.*.prefetch_factor",
)
PLACES = ("device", "output_root", "data.dir")
"""Recorded so that ``--recorded`` finds the run again, but no difference by themselves."""


def training_settings(config: Config, arm: str) -> dict[str, Any]:
    """Dotted keys and values that a training of ``arm`` depends on."""
    wanted = (*IDENTITY, f"arms.{arm}.*")
    return {
        key: value
        for key, value in flatten(config.model_dump(mode="json")).items()
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in wanted)
        and not any(fnmatch.fnmatchcase(key, pattern) for pattern in NOT_IDENTITY)
    }


@dataclass(frozen=True)
class Difference:
    """One setting that differs between a finished training and now."""

    key: str
    recorded: Any
    present: Any

    @property
    def variable(self) -> str | None:
        """The environment variable of the key."""
        return VARIABLE_OF_KEY.get(self.key)


def differences(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[Difference]:
    """Settings that differ; keys that only one side knows are those of another version and are passed
    over."""
    return [
        Difference(key, recorded[key], present[key])
        for key in recorded
        if key in present and key not in PLACES and recorded[key] != present[key]
    ]


def difference_table(found: list[Difference]) -> str:
    """Differences as aligned lines: key, recorded, present, variable."""
    rows = [("key", "recorded", "present", "variable")]
    rows += [(d.key, _text(d.recorded), _text(d.present), d.variable or "(config file)") for d in found]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """The record beside a finished training, or None where there is none that can be read."""
    folder = Path(folder)
    if not (folder / "checkpoint.json").is_file():
        return None
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("settings"), dict) else None
