"""Whole trainings through ``train_accelerate.py``: files, loader, logging, optimizer and all."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .architecture import made_up_words, random_model, save_processor
from .mix import describe, draw_shapes, write_tmdb
from .recorder import free_memory

logger = logging.getLogger(__name__)

WORKERS = 12
PREFETCH = 192
"""Samples each worker prepares ahead: two buffers of 1,024 together, as odb needs to keep the GPU fed."""

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow_scripts"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        flags: Of ``train_accelerate.py``.
        logging_steps: Steps between looks at the loss; 1 as the published form.
        settle_steps: First steps that are left out: compiling, the loader's start, odb's ramp.
        needs_seconds: About how long it takes, start included.
    """

    name: str
    flags: tuple[str, ...]
    logging_steps: int
    settle_steps: int
    needs_seconds: float


def runs(tiny: bool) -> list[Run]:
    """The trainings in order of what they are worth."""
    ours = ("--performance", '{"compile_layers": true, "checkpointing": "off"}')
    auto = ("--performance", '{"compile_layers": true}')
    plain = ("--performance", "reference", "--gradient-checkpointing", "on")
    limited = ("--max-steps",)
    if tiny:
        fast = ("--performance", "auto")
        return [
            Run(
                "end to end, ODB 1,024 packed, ours",
                (*odb_flags("1024", "pack"), *fast, *limited, "12"),
                2,
                4,
                90,
            ),
            Run("end to end, fixed 1, plain", (*fixed_flags("1"), *plain, *limited, "12"), 1, 4, 90),
        ]
    full = ("--performance", '{"compile_layers": true, "checkpointing": "on"}', "--optimizer-states", "16bit")
    return [
        Run("end to end, ODB 49,152 packed, ours", odb_flags("49152", "pack") + auto, 10, 10, 165),
        Run("end to end, ODB 49,152 packed, checkpointed", odb_flags("49152", "pack") + full, 10, 10, 175),
        Run("end to end, ODB 12,288 padded, ours", odb_flags("12288", "pad") + ours, 20, 40, 175),
        Run("end to end, fixed 1, plain", (*fixed_flags("1"), *plain, *limited, "90"), 1, 20, 90),
        Run(
            "end to end, ODB 12,288 padded, plain",
            (*odb_flags("12288", "pad"), *plain, *limited, "40"),
            1,
            10,
            110,
        ),
        Run(
            "end to end, fixed 1 packed, ours",
            (*fixed_flags("1", "pack"), *ours, *limited, "700"),
            50,
            100,
            140,
        ),
    ]


def odb_flags(budget: str, padding: str, prefetch: int = PREFETCH) -> tuple[str, ...]:
    """Flags of a training with ODB."""
    return (
        *("--loader", "odb", "--token-budget", budget, "--padding", padding),
        *("--no-warmup-buffer", "--prefetch-factor", str(prefetch)),
    )


def fixed_flags(size: str, padding: str = "pad") -> tuple[str, ...]:
    """Flags of a training with fixed batches."""
    return ("--loader", "standard", "--fixed-batch-size", size, "--padding", padding)


def prepare(
    folder: Path, config: Any, samples: int, device: torch.device, tiny: bool, seed: int
) -> dict[str, Any]:
    """Write model, data and its validation below ``folder``; returns seconds and means for the record."""
    seconds = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        seconds[name], clock = time.perf_counter() - clock, time.perf_counter()

    dtype = torch.float32 if tiny else torch.bfloat16
    model = random_model(config, device, dtype, seed)
    model.save_pretrained(folder / "model")
    del model
    free_memory()
    words = made_up_words(500, seed)
    save_processor(folder / "model", [" " + word for word in words] * 20)
    lap("model")
    shapes = draw_shapes(samples, seed, shrink=8 if tiny else 1)
    write_tmdb(folder / "tmdb", shapes, words, seed, workers=min(os.cpu_count() or 1, 16))
    lap("data")
    command = [
        sys.executable,
        str(SCRIPTS / "validate_tmdb.py"),
        *("--data", str(folder / "tmdb"), "--model", str(folder / "model")),
        *("--output-dir", str(folder / "validation")),
    ]
    _call(command, folder / "validation.log", 300, device)
    lap("validation")
    return {f"{name}_seconds": value for name, value in seconds.items()} | describe(shapes)


def train(folder: Path, run: Run, device: torch.device, timeout: float, tiny: bool) -> dict[str, Any]:
    """One training; figures from its step log, the settling steps left out, and from its summary."""
    number = len(list(folder.glob("run-*")))
    output = folder / f"run-{number}"
    output.mkdir()
    command = [
        sys.executable,
        str(SCRIPTS / "train_accelerate.py"),
        *("--arm", "bench", "--data", str(folder / "tmdb"), "--validation", str(folder / "validation")),
        *("--model", str(folder / "model"), "--output-dir", str(output), "--val-size", "16"),
        *("--lr", "1e-7", "--save-final-model", "0", "--checkpoint-every-minutes", "0"),
        *("--logging-steps", str(run.logging_steps), "--num-workers", "2" if tiny else str(WORKERS)),
        *run.flags,
        *(("--cpu", "--precision", "fp32", "--buffer-size", "32") if device.type == "cpu" else ()),
    ]
    _call(command, output / "log.txt", timeout, device)
    summary = json.loads((output / "train_summary_bench.json").read_text())
    lines = [json.loads(line) for line in (output / "step_log.jsonl").read_text().splitlines()]
    return settled(lines, run.settle_steps, run.logging_steps) | {
        "recompiled_because": recompiled_because((output / "log.txt").read_text(errors="replace")),
        "peak_gb": (summary["peak_memory_bytes_gpu"] or 0) / 1e9,
        "loss": lines[-1]["loss"],
        "startup_seconds": summary["startup_seconds"],
        "whole_run_tokens_per_second": summary["real_tokens_per_second"],
        "audit_complete": summary["samples_audit"]["complete"],
        "checkpointing": summary["performance_switches"].get("checkpointing"),
        "switches": summary["performance_switches"],
    }


def settled(lines: list[dict[str, Any]], settle_steps: int, logging_steps: int) -> dict[str, Any]:
    """Speed between two looks at the device: the first after ``settle_steps`` and the last of the run."""
    looks = [n for n, line in enumerate(lines) if line["step"] % logging_steps == 0]
    first = next((n for n in looks if lines[n]["step"] >= settle_steps), looks[0])
    counted = lines[first + 1 : looks[-1] + 1]
    if not counted:
        raise ValueError(f"{len(lines)} steps are too few to leave out the first {settle_steps}")
    seconds = counted[-1]["elapsed_seconds"] - lines[first]["elapsed_seconds"]
    real = sum(line["real_tokens"] for line in counted)
    padded = sum(line["padded_tokens"] for line in counted)
    compiling = sum(line["compile_ms"] for line in counted) / 1e3
    return {
        "steps": len(counted),
        "seconds": seconds,
        "step_ms": seconds / len(counted) * 1e3,
        "samples_per_second": sum(line["samples"] for line in counted) / seconds,
        "real_tokens_per_second": real / seconds,
        "padding_ratio": padded / (real + padded),
        "data_wait_share": sum(line["data_wait_ms"] for line in counted) / 1e3 / seconds,
        "compile_seconds": compiling,
        "real_tokens_per_second_without_compiling": real / (seconds - compiling),
        "compiling_steps": [line["step"] for line in counted if line["compile_ms"] > 0],
    }


def recompiled_because(log: str) -> list[str]:
    """The failed guards that torch names under ``TORCH_LOGS=recompiles``, each once."""
    found = re.findall(r"^.*?- (\d+/\d+: .*)$", log, re.MULTILINE)
    return list(dict.fromkeys(reason[:300] for reason in found))[:40]


def _call(command: list[str], log: Path, timeout: float, device: torch.device) -> None:
    environment = dict(os.environ, PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    environment.setdefault("TORCH_LOGS", "recompiles")
    if device.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # the program ends its own workers
            process.wait(60)
            status = "timeout"
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{Path(command[1]).name} ended with {status}:\n{tail}")
