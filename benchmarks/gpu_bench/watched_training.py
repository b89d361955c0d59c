"""Run ``train_accelerate.py`` as it is, and note what each rank needed.

    watched_training.py NOTES FLAGS OF train_accelerate.py

Writes to the folder NOTES: ``rank-R.json`` (peak memory) and ``exchange-R.jsonl`` (one line per metadata
exchange of odb: seconds on the clock, seconds it took). The exchange runs in a process that odb forks off;
only there the collective is replaced by a timed one, the training process stays as it is.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().parents[2] / "workflow_scripts" / "train_accelerate.py"


def time_exchanges(path: Path) -> None:
    """In a forked process: note the time of each exchange of metadata. Does nothing without odb."""
    if "odb.grouping" not in sys.modules:
        return
    distributed = sys.modules["torch.distributed"]
    gather = distributed.all_gather_into_tensor

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = gather(*args, **kwargs)
        line = json.dumps([began, time.perf_counter() - began])
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return result

    distributed.all_gather_into_tensor = timed


def note_memory(path: Path) -> None:
    """Peak memory of this rank in bytes: of its GPU (None without one) and of the process."""
    torch = sys.modules.get("torch")
    used_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    values = {
        "gpu": torch.cuda.max_memory_allocated() if used_gpu else None,
        "gpu_reserved": torch.cuda.max_memory_reserved() if used_gpu else None,
        "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    path.write_text(json.dumps(values), encoding="utf-8")


def main() -> None:
    """Run the program."""
    notes, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
    notes.mkdir(parents=True, exist_ok=True)
    sys.argv = [str(PROGRAM), *sys.argv[2:]]
    sys.path[0] = str(PROGRAM.parent)
    os.register_at_fork(after_in_child=lambda: time_exchanges(notes / f"exchange-{rank}.jsonl"))
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    finally:
        note_memory(notes / f"rank-{rank}.json")


if __name__ == "__main__":
    main()
