"""Step log and progress: a JSON line per optimizer step, a bar on a terminal, lines in a log."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..runtime.errors import UserError
from ..runtime.files import dump_json, iter_lines

logger = logging.getLogger(__name__)

STEP_LOG_NAME = "step_log.jsonl"
SECONDS_BETWEEN_LINES = 15.0


class StepLog:
    """Appends to ``step_log.jsonl``; every line is flushed.

    Args:
        folder: output folder of the arm; None on ranks that write nothing.
        keep_steps: lines of these first steps stay (a resumed run), later ones go.
    """

    def __init__(self, folder: Path | None, keep_steps: int) -> None:
        self._file = None
        if folder is None:
            return
        path = folder / STEP_LOG_NAME
        kept = []
        if keep_steps and path.exists():
            for _, line in iter_lines(path):
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # the last line of a killed run
                    continue
                if entry["step"] <= keep_steps:
                    kept.append(line.decode())
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: dict[str, Any]) -> None:
        """Append one step."""
        if self._file is None:
            return
        try:
            self._file.write(dump_json(entry) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"cannot write the step log: {error}", where=self._file.name) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class Progress:
    """How far the training is, on rank 0.

    Args:
        total: samples to emit over the whole run.
        done: samples emitted before (a resumed run).
    """

    def __init__(self, total: int, done: int, shown: bool, what: str) -> None:
        self._total, self._first, self._done = total, done, done
        self._start = self._last_line = time.monotonic()
        self._tokens = 0
        self._shown, self._what = shown, what
        self._bar = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="sample", desc=what, smoothing=0.1)

    def update(self, entry: dict[str, Any]) -> None:
        """Take in one entry of the step log."""
        self._done = entry["samples_total"]
        self._tokens += entry["real_tokens"]
        if not self._shown:
            return
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {entry['loss']:.4f}, lr {entry['lr']:.2e}", refresh=False)
            self._bar.update(self._done - self._bar.n)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES or self._done >= self._total:
            self._last_line = now
            seconds = max(now - self._start, 1e-9)
            rate = (self._done - self._first) / seconds
            left = (self._total - self._done) / rate if rate > 0 else math.inf
            logger.info(
                "%s: step %d, %d of %d samples, loss %.4f, %.1f samples/s, %.0f tokens/s, %s left",
                self._what,
                entry["step"],
                self._done,
                self._total,
                entry["loss"],
                rate,
                self._tokens / seconds,
                _clock(left),
            )

    def close(self) -> None:
        """Finish the bar."""
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
