"""Results of an interrupted run, kept so that the next run goes on instead of starting again.

Each rank appends one line per finished batch to a file of its own, in a folder named by the fingerprint of
what is computed (checkpoint, data, settings that can change a result). A line is a whole batch: a line cut
off by a kill is dropped whole, so that its batch runs again with the same samples and gives the same bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from odb_workflow.runtime.errors import UserError
from odb_workflow.runtime.files import atomic_write_json, dump_json, iter_lines, read_json

logger = logging.getLogger(__name__)

FOLDER = "partial"


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Hex SHA-256 of the settings, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class PartialResults:
    """The partial results of one evaluation.

    Args:
        folder: Results folder of the evaluation; the partial results lie in ``partial/<fingerprint>`` below
            it.
        settings: What the fingerprint is taken of; stored beside the results so that a person can read it.
        phase: Folder inside the fingerprint's one, for a later phase of the same evaluation that computes
            other values under the same keys.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], *, phase: str = "") -> None:
        self.root = Path(folder) / FOLDER
        self.settings = dict(settings)
        self.fingerprint = fingerprint(self.settings)
        self.evaluation = self.root / self.fingerprint[:16]
        self.path = self.evaluation / phase
        self._handle: IO[str] | None = None

    def prepare(self) -> int:
        """Make the folder, name what other settings left behind, and return the number of this launch. Rank 0
        only.
        """
        for other in sorted(self.root.glob("*/settings.json")):
            if other.parent != self.evaluation:
                theirs = read_json(other)
                differing = sorted(
                    key for key in {*theirs, *self.settings} if theirs.get(key) != self.settings.get(key)
                )
                logger.info(
                    "partial results of another run are left aside in %s (different: %s)",
                    other.parent,
                    ", ".join(differing),
                )
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write_json(self.evaluation / "settings.json", self.settings)
        launches = [int(file.name.split("-")[1]) for file in self.path.glob("launch-*-rank-*.jsonl")]
        return max(launches, default=0) + 1

    def load(self) -> dict[str, list[float]]:
        """Values by key of everything that earlier launches finished."""
        values: dict[str, list[float]] = {}
        for file in sorted(self.path.glob("launch-*-rank-*.jsonl")):
            for number, line in iter_lines(file):
                try:
                    batch = json.loads(line)
                except (UnicodeDecodeError, json.JSONDecodeError):
                    logger.info("%s line %d was cut off; its batch runs again", file.name, number)
                    continue
                values.update(zip(batch["keys"], batch["values"], strict=True))
        return values

    def open(self, launch: int, rank: int) -> None:
        """Open this rank's file; a fresh one per launch, because the last line of an older one may be cut
        off.
        """
        try:
            # The handle outlives this call: one line is appended per batch until ``close``.
            self._handle = open(  # noqa: SIM115
                self.path / f"launch-{launch:04d}-rank-{rank}.jsonl", "a", encoding="utf-8", newline="\n"
            )
        except OSError as error:
            raise UserError(f"cannot write partial results: {error}", where=str(self.path)) from error

    def append(self, keys: Sequence[str], values: Sequence[Sequence[float]]) -> None:
        """Add one finished batch."""
        if self._handle is None:
            raise RuntimeError("open() comes before append()")
        try:
            self._handle.write(
                dump_json({"keys": list(keys), "values": [list(row) for row in values]}) + "\n"
            )
            self._handle.flush()
        except OSError as error:
            raise UserError(
                f"cannot write partial results: {error}",
                where=str(self.path),
                fix="free some space, then run again",
            ) from error

    def close(self) -> None:
        """Close this rank's file."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def remove(self) -> None:
        """Delete the partial results of this evaluation, all phases, after its results are in place."""
        self.close()
        shutil.rmtree(self.evaluation, ignore_errors=True)
        if self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()
