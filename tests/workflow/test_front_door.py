"""run.sh and plain Snakemake: commands, targets, paths, records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .conftest import clean_environment, dry_run, plan_of, snakemake
from .stub_programs import stub_checkout

pytestmark = pytest.mark.workflow


def run_sh(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "run.sh"), *arguments],
        env=clean_environment({"PYTHON": sys.executable, **variables}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize(
    "target",
    [
        *(
            "all",
            "all_odb",
            "all_standard",
            "data",
            "train_odb",
            "train_standard",
            "eval_odb",
            "eval_standard",
        ),
        *("eval_valloss", "benchmark", "comparison", "data_report"),
    ],
)
def test_targets_of_a_finished_run_have_nothing_to_do(finished: Path, target: str) -> None:
    answer = dry_run(finished, target)
    assert (answer.status, answer.jobs) == (0, {}), answer.text


@pytest.mark.parametrize(
    "command", ["data", "train-odb", "eval-standard", "all-odb", "benchmark", "eval-valloss"]
)
def test_commands_are_targets(finished: Path, command: str) -> None:
    done = run_sh(finished, command, "-n")
    assert done.returncode == 0, done.stdout
    assert "Nothing to be done" in done.stdout


def test_help_names_every_command(repository: Path) -> None:
    text = run_sh(repository, "help").stdout
    for name in [
        "install",
        "data",
        "train-odb",
        "eval-odb",
        "eval-valloss",
        "benchmark",
        "all-odb",
        "all",
        "report",
        "inspect",
        "dag",
        "test",
    ]:
        assert name in text


def test_unknown_command_shows_the_commands(repository: Path) -> None:
    done = run_sh(repository, "trian-odb")
    assert done.returncode == 2
    assert "no command 'trian-odb'" in done.stdout and "train-ARM" in done.stdout


def test_unsupported_interpreter_is_named(repository: Path, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    fake.chmod(0o755)
    done = run_sh(repository, "data", PYTHON=str(fake))
    assert done.returncode == 1
    assert "is not Python 3.11 or 3.12: Python 3.9.1" in done.stdout


def processor_seconds(start: os.times_result) -> float:
    """CPU time of child processes since ``start``: on a busy machine the wall clock says little."""
    now = os.times()
    return now.children_user + now.children_system - start.children_user - start.children_system


def test_second_call_costs_little(finished: Path) -> None:
    start = os.times()
    snakemake(finished, "-n", "all")
    plain = processor_seconds(start)
    start = os.times()
    run_sh(finished, "all", "-n")
    assert processor_seconds(start) - plain < 2


def test_dry_run_of_a_fresh_checkout_is_quick(repository: Path, tmp_path: Path) -> None:
    checkout = stub_checkout(repository, tmp_path / "fresh")
    start = os.times()
    done = snakemake(checkout, "-n", "all")
    assert done.returncode == 0, done.stdout
    assert processor_seconds(start) < 5
    assert plan_of(done.stdout, 0).jobs["train"] == 2


def test_snakefile_imports_nothing_heavy(repository: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'workflow_scripts'); import odb_workflow.workflow.start;"
        "print([name for name in ('torch', 'transformers', 'numpy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_checkout_and_working_directory_with_odd_names(repository: Path, tmp_path: Path) -> None:
    checkout = stub_checkout(repository, tmp_path / 'it\'s a "Prüfung"')
    work = tmp_path / "an other $place"
    done = snakemake(checkout, "all", "--directory", str(work), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert (work / "results/embedded/comparison.html").is_file()
    assert not (checkout / "outputs").exists()


def test_output_root_with_odd_name(finished_copy: Path) -> None:
    done = run_sh(finished_copy, "train-odb", ODB_MM_MIX_OUTPUT_ROOT='out puts/it\'s "odd"')
    assert done.returncode == 0, done.stdout
    assert (finished_copy / 'out puts/it\'s "odd"/odb/checkpoint.json').is_file()


def test_read_only_checkout(repository: Path, tmp_path: Path) -> None:
    checkout = stub_checkout(repository, tmp_path / "checkout")
    work = tmp_path / "work"
    # Root may write everywhere; a checkout that is not there afterwards shows the same.
    before = sorted(
        path.relative_to(checkout) for path in checkout.rglob("*") if "__pycache__" not in path.parts
    )
    done = snakemake(
        checkout, "all", "--directory", str(work), env={"PYTHONDONTWRITEBYTECODE": "1"}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    after = sorted(
        path.relative_to(checkout) for path in checkout.rglob("*") if "__pycache__" not in path.parts
    )
    assert before == after


def test_as_a_module_of_another_workflow(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(
        "module odb:\n"
        f"    snakefile: {str(finished / 'Snakefile')!r}\n"
        "    config: {'run': 'inner', 'arms': {'standard': None}}\n"
        "use rule * from odb as odb_*\n"
        "rule mine:\n"
        "    input: 'outputs/inner/odb/checkpoint.json'\n"
        "    default_target: True\n"
    )
    done = snakemake(tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "outputs/inner/odb/checkpoint.json").is_file()
    assert not (tmp_path / "outputs/inner/standard").exists()


def test_records_beside_the_results(finished: Path) -> None:
    record = json.loads((finished / "outputs/embedded/odb/run_record.json").read_text())
    assert record["arm"] == "odb"
    assert record["settings"]["arms.odb.token_budget"] == 1536
    assert record["config"]["training"]["lr"] == 1e-3
    assert record["data"]["records_sha256"]
    assert {"command", "git", "versions", "time"} <= set(record["provenance"])
    for folder in ("outputs/embedded", "results/embedded"):
        merged = yaml.safe_load((finished / folder / "config.yaml").read_text())
        assert merged["run"] == "embedded"


def test_token_is_written_nowhere(repository: Path, tmp_path: Path) -> None:
    checkout = stub_checkout(repository, tmp_path / "checkout")
    done = snakemake(checkout, "all_odb", env={"HF_TOKEN": "hf_verysecret"})
    assert done.returncode == 0, done.stdout
    assert "hf_verysecret" not in done.stdout
    found = subprocess.run(["grep", "-rl", "hf_verysecret", str(checkout)], capture_output=True, text=True)
    assert found.stdout == ""


def test_several_seeds_have_folders_of_their_own(finished_copy: Path) -> None:
    done = snakemake(finished_copy, "all", "--config", "seeds=[1, 2]")
    assert done.returncode == 0, done.stdout
    for seed in (1, 2):
        checkpoint = finished_copy / f"outputs/embedded/odb/seed-{seed}/checkpoint.json"
        flags = json.loads(checkpoint.read_text())["flags"]
        assert flags[flags.index("--seed") + 1] == str(seed)
    # What was there with one seed is untouched.
    assert (finished_copy / "outputs/embedded/odb/checkpoint/weights").is_file()
    assert dry_run(finished_copy, "all").jobs == {"compare": 1, "all": 1}


def test_checkpoint_of_another_training(finished_copy: Path, tmp_path: Path) -> None:
    model = tmp_path / "a model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("x")
    done = run_sh(finished_copy, "benchmark", ODB_ACCEL_EVAL_CHECKPOINT=str(model))
    assert done.returncode == 0, done.stdout
    assert (model / "mmmu_mc_likelihood_accelerate/mmmu_mc_likelihood_results.json").is_file()
    variables = {"ODB_ACCEL_EVAL_CHECKPOINT": str(model)}
    assert dry_run(finished_copy, "benchmark", env=variables).jobs == {}
    elsewhere = {**variables, "ODB_ACCEL_EVAL_OUTPUT_ROOT": str(tmp_path / "results")}
    done = run_sh(finished_copy, "eval-valloss", **elsewhere)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "results/eval_out_accelerate_valloss/eval_results.json").is_file()
    (model / "config.json").write_text('{"other": 1}')
    assert dry_run(finished_copy, "benchmark", env=variables).jobs == {"mmmu_external": 1, "benchmark": 1}


def test_hub_checkpoint_goes_below_the_run(finished: Path) -> None:
    answer = dry_run(finished, "benchmark", env={"ODB_ACCEL_EVAL_CHECKPOINT": "some/model"})
    assert answer.jobs == {"mmmu_external": 1, "benchmark": 1}
    assert "outputs/embedded/external/some--model/mmmu_mc_likelihood_accelerate" in answer.text


def test_named_arm_folder_is_the_arm(finished: Path) -> None:
    for folder in ("outputs/embedded/standard", "outputs/embedded/standard/checkpoint"):
        assert dry_run(finished, "benchmark", env={"ODB_ACCEL_EVAL_CHECKPOINT": folder}).jobs == {}


def test_missing_evaluation_is_made_again(finished_copy: Path) -> None:
    shutil.rmtree(finished_copy / "outputs/embedded/odb/mmmu_mc_likelihood_accelerate")
    answer = dry_run(finished_copy, "all")
    assert answer.jobs == {"mmmu": 1, "compare": 1, "all": 1}


def test_status_and_provenance(finished: Path) -> None:
    status = run_sh(finished, "status")
    assert status.returncode == 0, status.stdout
    assert "odb" in status.stdout and "finished" in status.stdout
    text = run_sh(finished, "provenance").stdout
    assert "outputs/embedded/odb/run_record.json\n" in text
    assert len(text.splitlines()) < 60
    record = json.loads((finished / "outputs/embedded/odb/run_record.json").read_text())
    assert f"sha256 {record['data']['records_sha256'][:12]}" in text
    assert f"torch {record['provenance']['versions']['torch']}" in text
    text = run_sh(finished, "provenance", "--json").stdout
    assert json.loads(text)["outputs/embedded/odb/run_record.json"]["arm"] == "odb"


def test_names_that_arms_must_not_take_are_all_rules_and_targets(finished: Path) -> None:
    from odb_workflow.config.schema import RULES, TARGETS

    done = snakemake(finished, "--list-rules", env={"ODB_ACCEL_EVAL_CHECKPOINT": "some/model"})
    made = {f"{kind}_{arm}" for kind in ("train", "eval", "all") for arm in ("odb", "standard")}
    assert {line for line in done.stdout.splitlines() if line.isidentifier()} - made == {*RULES, *TARGETS}


def test_a_config_file_that_is_not_there_is_named(finished: Path) -> None:
    for argument in (["--configfile", "missing.yaml"], ["--configfile=missing.yaml"]):
        done = run_sh(finished, "all", "-n", *argument)
        assert done.returncode != 0
        assert "there is no config file missing.yaml" in done.stdout
        assert "Traceback" not in done.stdout


@pytest.mark.parametrize("command", ["train-stndard", "eval-stndard", "all-stndard"])
def test_an_unknown_arm_names_the_arms_there_are(finished: Path, command: str) -> None:
    done = run_sh(finished, command, "-n")
    assert done.returncode != 0
    assert "there is no arm 'stndard'; did you mean 'standard'?" in done.stdout
    assert "the arms of this configuration: odb, standard" in done.stdout
