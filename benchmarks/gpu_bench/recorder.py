"""The record: one JSON line per measurement, written at once, and the table made of them."""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Counted for this architecture: 10.3 GFLOP a token trained and 1.2 GFLOP a token of frozen vision at the
# 790 TFLOP/s that an H200 gives on random data.
FULL_USE_TOKENS_PER_SECOND = 68_000.0


class Recorder:
    """Appends measurements to ``path`` and knows the time that is left.

    Args:
        deadline_seconds: After so many seconds no further measurement starts.
    """

    def __init__(self, path: Path, deadline_seconds: float, command: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.deadline = time.monotonic() + deadline_seconds
        self.lines: list[dict[str, Any]] = []
        self.faults = 0
        self._write({"what": "machine", "command": command, **machine()})

    def add(self, what: str, **values: Any) -> None:
        """Write one line: ``what`` was measured and its values."""
        self._write({"what": what, **values})
        logger.info("%s: %s", what, ", ".join(f"{k} {_short(v)}" for k, v in values.items() if _is_plain(v)))

    @contextmanager
    def measuring(self, what: str, needs_seconds: float) -> Iterator[bool]:
        """Whether time is left for ``what``; a variant that fails is recorded, and ends nothing else."""
        left = self.deadline - time.monotonic()
        if left < needs_seconds:
            self.add(what, skipped=f"{left:.0f} s left, about {needs_seconds:.0f} s needed")
            yield False
            return
        try:
            yield True
        except torch.cuda.OutOfMemoryError as error:
            self.add(what, failed="out of GPU memory", message=str(error).splitlines()[0])
        except Exception as error:
            # Device time is short: the other variants are still measured, and the table shows this one.
            logger.exception("%s failed", what)
            self.add(what, failed=f"{type(error).__name__}: {error}"[:2000])
            self.faults += 1
        free_memory()

    def _write(self, line: dict[str, Any]) -> None:
        line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **_finite(line)}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def machine() -> dict[str, Any]:
    """Versions and device."""
    import transformers

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else None,
        "cudnn": torch.backends.cudnn.version(),
    }


def free_memory() -> None:
    """Give cached GPU memory back between variants."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(lines: list[dict[str, Any]]) -> str:
    """The lines with a speed, as text; the rest below."""
    header = (
        f"{'variant':<52} {'tok/s':>8} {'samples/s':>9} {'step ms':>8} {'peak GB':>8} {'pad':>5} {'MFU':>5}"
    )
    rows = [header, "-" * len(header)]
    others = []
    for line in lines:
        if "real_tokens_per_second" in line:
            speed = line["real_tokens_per_second"]
            trained = "step_ms" in line
            rows.append(
                f"{line['what']:<52} {speed:>8.0f} {line['samples_per_second']:>9.2f} "
                f"{line.get('step_ms') or 0:>8.0f} {line.get('peak_gb') or 0:>8.1f} "
                f"{line.get('padding_ratio') or 0:>5.2f} "
                + (f"{speed / FULL_USE_TOKENS_PER_SECOND:>5.0%}" if trained else "")
            )
        elif line["what"] not in ("machine", "data"):
            values = {k: v for k, v in line.items() if k not in ("what", "at") and _is_plain(v)}
            others.append(f"{line['what']}: " + ", ".join(f"{k} {_short(v)}" for k, v in values.items()))
    return "\n".join([*rows, "", *others])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) or value is None


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
