"""A finished training is never lost to a forgotten variable, and another model's folder never overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from .conftest import clean_environment, dry_run, snakemake

pytestmark = pytest.mark.workflow


def run_sh(
    checkout: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "run.sh"), *arguments],
        env=clean_environment({"PYTHON": sys.executable, **(env or {})}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )


def weights(checkout: Path, run: str = "embedded") -> Path:
    return checkout / "outputs" / run / "odb" / "checkpoint" / "weights"


@pytest.fixture
def trained_with_variables(finished_copy: Path) -> Path:
    """The first command of the published sequence, with variables."""
    done = run_sh(finished_copy, "train-odb", env={"ODB_MM_MIX_TRAIN_SIZE": "64", "ODB_MM_MIX_LR": "2e-4"})
    assert done.returncode == 0, done.stdout
    return finished_copy


def test_evaluation_without_the_variables_stops_and_lists(trained_with_variables: Path) -> None:
    before = weights(trained_with_variables).stat().st_mtime_ns
    done = run_sh(trained_with_variables, "eval-odb")
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["key", "recorded", "present", "variable"] in lines
    assert ["split.train_size", "64", "4000", "ODB_MM_MIX_TRAIN_SIZE"] in lines
    assert ["training.lr", "0.0002", "0.001", "ODB_MM_MIX_LR"] in lines
    assert "--recorded" in done.stdout and "--retrain" in done.stdout
    assert weights(trained_with_variables).stat().st_mtime_ns == before


def test_recorded_evaluates_what_was_trained(trained_with_variables: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    done = run_sh(trained_with_variables, "eval-odb", "--recorded", env={"STUB_CALLS": str(calls)})
    assert done.returncode == 0, done.stdout
    called = [json.loads(line)[0] for line in calls.read_text().splitlines()]
    assert "train_accelerate" not in called
    assert {"eval_valloss", "eval_benchmark"} <= set(called)


def test_retrain_trains_with_the_present_settings(trained_with_variables: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    done = run_sh(trained_with_variables, "eval-odb", "--retrain", env={"STUB_CALLS": str(calls)})
    assert done.returncode == 0, done.stdout
    train = [json.loads(line) for line in calls.read_text().splitlines() if '"train_accelerate"' in line]
    assert len(train) == 1
    assert train[0][train[0].index("--train-size") + 1] == "4000"


def test_same_variables_again_just_evaluate(trained_with_variables: Path) -> None:
    done = run_sh(
        trained_with_variables, "eval-odb", env={"ODB_MM_MIX_TRAIN_SIZE": "64", "ODB_MM_MIX_LR": "2e-4"}
    )
    assert done.returncode == 0, done.stdout
    assert "Training arm" not in done.stdout


def test_plain_snakemake_prints_the_list(trained_with_variables: Path) -> None:
    answer = dry_run(trained_with_variables, "eval_odb")
    assert answer.status == 0
    assert answer.jobs["train"] == 1
    assert "note: the finished training in outputs/embedded/odb was made with other settings:" in answer.text
    assert "ODB_MM_MIX_TRAIN_SIZE" in answer.text
    assert "note:" not in dry_run(trained_with_variables, "data").text


def test_forgotten_model_variable(finished_copy: Path, tmp_path: Path) -> None:
    """Without the variable the preset and the run's folder are others: the last run is the hint."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    first = {"ODB_MM_MIX_MODEL": str(model), "ODB_MM_MIX_OUTPUT_ROOT": "outputs/mine"}
    done = run_sh(
        finished_copy, "train-odb", "--config", "device=cpu", "training={deepspeed_config: null}", env=first
    )
    assert done.returncode == 0, done.stdout
    for folder in ("outputs/embedded",):
        subprocess.run(["rm", "-r", str(finished_copy / folder)], check=True)
    done = run_sh(finished_copy, "eval-odb")
    assert done.returncode == 1
    assert "there is no finished training of `odb` here, but one in outputs/mine/odb" in done.stdout
    assert "ODB_MM_MIX_MODEL" in done.stdout
    assert str(model) in done.stdout
    recorded = run_sh(finished_copy, "eval-odb", "--recorded")
    assert recorded.returncode == 0, recorded.stdout
    assert (finished_copy / "outputs/mine/odb/eval_out_accelerate_valloss/eval_results.json").is_file()
    assert "Training arm" not in recorded.stdout


def test_folder_of_another_model_is_not_overwritten(finished_copy: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    before = weights(finished_copy).stat().st_mtime_ns
    done = snakemake(finished_copy, "train_odb", "--config", f"model={{path: {model}}}")
    assert done.returncode == 1
    assert "outputs/embedded/odb holds a training of the model 'embedded'" in done.stdout
    assert "choose another `run`" in done.stdout
    assert weights(finished_copy).stat().st_mtime_ns == before


def test_report_never_trains(finished_copy: Path, tmp_path: Path) -> None:
    subprocess.run(["rm", "-r", str(finished_copy / "outputs/embedded/standard")], check=True)
    calls = tmp_path / "calls"
    done = run_sh(finished_copy, "report", env={"STUB_CALLS": str(calls)})
    assert done.returncode == 0, done.stdout
    called = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [call[0] for call in called] == ["compare"]
    assert "--allow-missing" in called[0]


def test_evaluation_trains_where_nothing_was_trained(finished_copy: Path, tmp_path: Path) -> None:
    subprocess.run(["rm", "-r", str(finished_copy / "outputs/embedded/odb")], check=True)
    done = run_sh(finished_copy, "eval-odb")
    assert done.returncode == 0, done.stdout
    assert "Training arm odb" in done.stdout


def test_checkpoint_of_another_run_is_not_evaluated_on_other_data(trained_with_variables: Path) -> None:
    named = {"ODB_ACCEL_EVAL_CHECKPOINT": "outputs/first/odb"}
    (trained_with_variables / "outputs/embedded").rename(trained_with_variables / "outputs/first")
    done = run_sh(trained_with_variables, "benchmark", env=named)
    assert done.returncode == 1
    assert "the finished training in outputs/first/odb was made with other settings" in done.stdout
    assert "ODB_MM_MIX_TRAIN_SIZE" in done.stdout
    assert "ODB_MM_MIX_LR" not in done.stdout  # the learning rate is no matter of an evaluation
