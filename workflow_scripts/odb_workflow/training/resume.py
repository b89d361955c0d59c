"""Resume points: a run that was killed or stopped goes on by the same command.

``<output-dir>/resume/`` holds ``latest.json`` and one folder ``step-N``; both appear whole or not at all. A
point made under other settings, data or software of the loader is moved aside and named, never used.
"""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..runtime.errors import UserError
from ..runtime.files import atomic_write_json, dump_json, read_json
from .agreement import Ranks

logger = logging.getLogger(__name__)

FOLDER_NAME = "resume"
LATEST_NAME = "latest.json"


@dataclass
class ResumePoint:
    """A resume point that fits this run.

    Attributes:
        folder: where its files are.
        state: epoch, counters, audits; as given to ``save_resume_point``.
        emitted: rows of the unfinished epoch, one int64 array per rank.
    """

    folder: Path
    state: dict[str, Any]
    emitted: list[np.ndarray]


def fingerprint_of(parts: dict[str, Any]) -> str:
    """SHA-256 over the canonical JSON of ``parts``."""
    return hashlib.sha256(dump_json(dict(sorted(parts.items()))).encode()).hexdigest()


def differing(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines ``key: recorded X, now Y`` for every leaf that differs."""
    lines = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differing(a, b, f"{prefix}{key}.")
        elif dump_json(a) != dump_json(b):
            lines.append(f"{prefix}{key}: recorded {a}, now {b}")
    return lines


def find_resume_point(output_dir: Path, parts: dict[str, Any]) -> ResumePoint | None:
    """The resume point of this very run, or None.

    One of another run, or one that cannot be read, is moved aside to ``resume.old-N`` with a warning. Call on
    rank 0.
    """
    folder = output_dir / FOLDER_NAME
    if not folder.exists():
        return None
    try:
        latest = read_json(folder / LATEST_NAME)
        reasons = differing(latest["fingerprint"], parts)
        if not reasons:
            point = folder / latest["folder"]
            state = read_json(point / "state.json")
            with np.load(point / "emitted.npz") as arrays:
                emitted = [arrays[f"rank{rank}"] for rank in range(len(arrays.files))]
            return ResumePoint(point, state, emitted)
    except (UserError, KeyError, OSError, ValueError) as error:
        reasons = [f"cannot be read: {error}"]
    aside = next(p for n in range(1, 10_000) if not (p := output_dir / f"{FOLDER_NAME}.old-{n}").exists())
    folder.rename(aside)
    logger.warning(
        "the resume point of another run was moved to %s, this training starts anew:\n  %s",
        aside.name,
        "\n  ".join(reasons[:20]),
    )
    return None


def save_resume_point(
    output_dir: Path,
    parts: dict[str, Any],
    state: dict[str, Any],
    emitted: np.ndarray,
    engine: Any,
    ranks: Ranks,
) -> None:
    """Write a resume point; called on all ranks, after a step.

    Args:
        parts: what a later run must have equal (see ``fingerprint_of``).
        state: JSON-ready; the same on all ranks.
        emitted: int64, rows that this rank trained on in the unfinished epoch.
    """
    folder = output_dir / FOLDER_NAME
    name = f"step-{state['totals']['step']:09d}"
    part, point = folder / f".{name}.part", folder / name
    emitted_all = ranks.gather_objects(emitted)
    try:
        if ranks.is_main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        ranks.barrier()
        torch.save(random_state(), part / f"random-rank{ranks.rank}.pt")
        engine.save(part, ranks.is_main)
        ranks.barrier()
        if ranks.is_main:
            np.savez(part / "emitted.npz", **{f"rank{rank}": rows for rank, rows in enumerate(emitted_all)})
            atomic_write_json(part / "state.json", state)
            shutil.rmtree(point, ignore_errors=True)
            part.rename(point)
            atomic_write_json(folder / LATEST_NAME, {"folder": name, "fingerprint": parts})
            for old in folder.iterdir():
                if old.name not in (name, LATEST_NAME) and old.is_dir():
                    shutil.rmtree(old, ignore_errors=True)
        ranks.barrier()
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "write" not in str(error):
            raise
        raise UserError(
            f"cannot write a resume point: {error}",
            where=str(folder),
            fix="free space there, or switch resume points off (--checkpoint-every-minutes 0); "
            "the point before it is intact and the same command continues from it",
        ) from error


def remove_resume_points(output_dir: Path) -> None:
    """The run is finished: its resume points are of no more use."""
    shutil.rmtree(output_dir / FOLDER_NAME, ignore_errors=True)


def random_state() -> dict[str, Any]:
    """State of all random generators of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(point: ResumePoint, rank: int) -> None:
    """Set all random generators of this process to a resume point's."""
    set_random_state(torch.load(point.folder / f"random-rank{rank}.pt", weights_only=False))


def set_random_state(state: dict[str, Any]) -> None:
    """Set all random generators of this process to what ``random_state`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
