"""The training program on a CUDA device; skipped by name where there is none."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from odb_workflow.model.load import load_processor
from odb_workflow.tmdb.validate import validate_tmdb

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow_scripts"
ODB = ["--loader", "odb", "--token-budget", "1024", "--buffer-size", "32", "--no-warmup-buffer"]
SHARED = [
    *("--lr", "1e-3", "--val-size", "0.1", "--max-length", "4096"),
    *("--num-workers", "2", "--seed", "5"),
]
LIMITED = """
import runpy, sys, torch
torch.cuda.set_per_process_memory_fraction(int(sys.argv[1]) / torch.cuda.mem_get_info()[1])
sys.argv = sys.argv[2:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def places(tiny_model_dir: Path, tiny_tmdb: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name model, data and validation."""
    folder = tmp_path_factory.mktemp("validation")
    validate_tmdb(
        tiny_tmdb,
        load_processor(tiny_model_dir, 589824),
        max_length=4096,
        output_dir=folder,
        processes=1,
        progress=False,
    )
    return ["--model", str(tiny_model_dir), "--data", str(tiny_tmdb), "--validation", str(folder)]


def train(
    places: list[str], out: Path, *flags: str, start: tuple[str, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    """One training of the arm ``gpu``."""
    command = [
        *start,
        str(SCRIPTS / "train_accelerate.py"),
        "--arm",
        "gpu",
        *places,
        "--output-dir",
        str(out),
    ]
    return subprocess.run([*command, *SHARED, *flags], capture_output=True, text=True, timeout=300)


def summary(places: list[str], out: Path, *flags: str, **how: tuple[str, ...]) -> dict:
    """Summary of a training that must succeed."""
    done = train(places, out, *flags, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "train_summary_gpu.json").read_text())


@pytest.mark.parametrize("padding", ["pad", "pack"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_sample_is_trained_once_in_each_precision(
    places: list[str], tmp_path: Path, precision: str, padding: str
) -> None:
    found = summary(places, tmp_path, *ODB, "--precision", precision, "--padding", padding)
    assert found["device"] == torch.cuda.get_device_name()
    assert found["samples_audit"]["complete"]
    assert math.isfinite(found["train_loss"])
    assert found["performance_switches"]["mode"] == "fast"
    assert found["peak_memory_bytes_gpu"] > 0


def test_the_fast_forward_trains_like_the_plain_one(places: list[str], tmp_path: Path) -> None:
    flags = [*ODB, "--precision", "fp32"]
    fast = summary(places, tmp_path / "fast", *flags)
    plain = summary(places, tmp_path / "plain", *flags, "--performance", "reference")
    assert plain["performance_switches"]["mode"] == "reference"
    assert fast["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-3)


def test_the_largest_batch_is_found_and_trained(places: list[str], tmp_path: Path) -> None:
    found = summary(
        places, tmp_path, "--loader", "standard", "--fixed-batch-size", "auto", "--max-steps", "2"
    )
    assert found["batch_size_search"]["size"] == found["fixed_batch_size"] > 1


def test_too_little_memory_names_the_batch_and_what_to_lower(places: list[str], tmp_path: Path) -> None:
    limited = (sys.executable, "-c", LIMITED, str(48 << 20))
    flags = ["--loader", "standard", "--fixed-batch-size", "54", "--gradient-checkpointing", "off"]
    done = train(places, tmp_path, *flags, start=limited)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "the GPU ran out of memory" in done.stderr
    assert "a batch of 54 samples, 54 x " in done.stderr
    assert "lower --token-budget (or --fixed-batch-size)" in done.stderr
    assert not (tmp_path / "checkpoint.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_zero_2_of_one_process_trains_like_plain(places: list[str], tmp_path: Path) -> None:
    config = str(SCRIPTS.parent / "config" / "ds_z2.json")
    flags = [*ODB, "--precision", "fp32"]
    started = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1")
    zero = summary(places, tmp_path / "zero", *flags, "--deepspeed-config", config, start=started)
    plain = summary(places, tmp_path / "plain", *flags)
    assert zero["deepspeed_stage"] == 2
    assert zero["samples_audit"]["ids_sha256"] == plain["samples_audit"]["ids_sha256"]
    assert zero["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-4)
