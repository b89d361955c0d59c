"""Faults that end a run before its first job, each with one message."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from odb_workflow.config.load import load_config
from odb_workflow.workflow.preflight import checks, gpu_fault, torch_fault

from .conftest import dry_run, snakemake

pytestmark = pytest.mark.workflow


def message(repository: Path, settings: dict, **given: object) -> str:
    config = load_config(repository, environment={}, command_line=settings).config
    values = {
        "targets": [],
        "requests": {"train": 0, "evaluate": 0},
        "limit": 1,
        "local": True,
        "devices": list,
        "torch_version": lambda: "2.14.1",
        **given,
    }
    error = checks(config, repository, **values)  # type: ignore[arg-type]
    return str(error or "")


def test_nothing_wrong(repository: Path) -> None:
    assert message(repository, {}) == ""


def test_missing_model_folder(repository: Path) -> None:
    text = message(repository, {"model": {"path": "/no/such/model"}})
    assert "model.path '/no/such/model' does not exist and is no Hub id (ODB_MM_MIX_MODEL)" in text


def test_folder_that_is_no_model(repository: Path, tmp_path: Path) -> None:
    assert "without config.json" in message(repository, {"model": {"path": str(tmp_path)}})


def test_a_folder_that_was_not_built_here_is_never_overwritten(repository: Path, tmp_path: Path) -> None:
    settings = {"data": {"dir": str(tmp_path)}}
    assert message(repository, settings) == "", "an empty folder may be filled"
    (tmp_path / "metadata.json").write_text("{}")
    assert "a build would delete" in message(repository, settings)
    (tmp_path / "records.jsonl").write_text("")
    assert message(repository, {**settings, "builder": {"kind": "existing"}}) == ""
    (tmp_path / ".built-by-workflow").write_text("")
    assert message(repository, settings) == ""


def test_hub_id_is_left_to_its_rule(repository: Path) -> None:
    assert message(repository, {"model": {"path": "Qwen/Qwen3-VL-2B-Instruct"}}) == ""


@pytest.mark.parametrize("version", ["2.8.0", "2.15.0", "3.0", None])
def test_torch_outside_the_range(repository: Path, version: str | None) -> None:
    assert "2.9 up to, not including, 2.15" in message(repository, {}, torch_version=lambda: version)


@pytest.mark.parametrize("version", ["2.9.1", "2.11.0+cu130", "2.14.1"])
def test_torch_inside_the_range(version: str) -> None:
    assert torch_fault(version) is None


def test_no_gpu_where_the_preset_wants_one() -> None:
    assert "needs 1 GPU(s), this machine shows 0" in (gpu_fault({"train": 1, "evaluate": 1}, 1, 0) or "")


def test_more_gpus_than_the_limit_names_the_flag() -> None:
    text = gpu_fault({"train": 4, "evaluate": 1}, 1, 8) or ""
    assert "--resources gpu=8" in text and "4 GPU(s)" in text and "the limit is 1" in text


@pytest.mark.parametrize(
    ("requests", "limit", "devices"),
    [({"train": 0}, 0, 0), ({"train": 2}, 2, 2), ({"train": 2}, None, 4), ({"train": 8}, 8, None)],
)
def test_gpus_that_can_be_had(requests: dict[str, int], limit: int | None, devices: int | None) -> None:
    assert gpu_fault(requests, limit, devices) is None


def test_gpus_do_not_matter_for_the_data(repository: Path) -> None:
    assert message(repository, {}, targets=["data"], requests={"train": 8}, torch_version=lambda: None) == ""


def test_port_in_use(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = message(repository, {"training": {"num_processes": 2, "master_port": port}})
    assert f"port {port} cannot be used" in text and "ODB_MM_MIX_MASTER_PORT" in text


def test_machines_need_slurm(repository: Path) -> None:
    settings = {"training": {"num_machines": 2}}
    assert "--workflow-profile profiles/slurm" in message(repository, settings)
    assert message(repository, settings, local=False) == ""


def test_files_that_are_not_there(repository: Path) -> None:
    text = message(
        repository,
        {
            "training": {"deepspeed_config": "no.json"},
            "builder": {"kind": "json", "sources": "none.yaml"},
        },
    )
    assert "training.deepspeed_config 'no.json' does not exist" in text
    assert "builder.sources 'none.yaml' does not exist" in text
    existing = message(repository, {"builder": {"kind": "existing"}, "data": {"dir": "/no/tmdb"}})
    assert "data.dir '/no/tmdb' has no metadata.json" in existing


def test_stops_before_the_first_job(finished_copy: Path) -> None:
    settings = ["device=cuda", "training={lr: 9e-3}"]
    assert dry_run(finished_copy, "all", "--config", *settings).status == 0
    done = snakemake(finished_copy, "all", "--config", *settings, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert "needs 1 GPU(s), this machine shows 0" in done.stdout
    assert "Training arm" not in done.stdout


def test_configuration_fault_is_one_message(finished: Path) -> None:
    answer = dry_run(finished, "all", "--config", "training={lrr: 1}")
    assert answer.status == 1
    assert "did you mean `training.lr`?" in answer.text
    assert "Traceback" not in answer.text


def test_failed_job_shows_its_log_and_last_lines(finished_copy: Path) -> None:
    done = snakemake(
        finished_copy, "all", "--config", "training={lr: 9e-3}", env={"STUB_FAIL": "train_accelerate"}
    )
    assert done.returncode == 1
    assert "last lines of logs/embedded/train/odb.log:" in done.stdout
    assert "error: the stub was told to fail" in done.stdout.split("last lines of")[1]
    assert (finished_copy / "logs/embedded/train/odb.log").read_text().startswith("first line of the fault")
