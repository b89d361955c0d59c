"""What reruns when: the table of the documentation, row by row, asked of Snakemake on a finished run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Plan, dry_run, snakemake
from .stub_programs import write_program

pytestmark = pytest.mark.workflow

NOTHING: dict[str, int] = {}
ONE_ARM = {"train": 1, "valloss": 1, "mmmu": 1, "compare": 1, "all": 1}
TRAININGS = {"train": 2, "valloss": 2, "mmmu": 2, "compare": 1, "all": 1}
VALLOSS = {"valloss": 3, "compare": 1, "all": 1}
MMMU = {"mmmu": 3, "compare": 1, "all": 1}
COMPARE = {"compare": 1, "all": 1}
VALIDATION = {**TRAININGS, "valloss": 3, "validate_tmdb": 1, "data_report": 1}
WITH_IMAGES = {**VALIDATION, "mmmu": 3}
MODEL = {**WITH_IMAGES, "prepare_model": 1}
EVERYTHING = {**MODEL, "build_tmdb": 1}

ROWS = {
    "nothing changed": ("", NOTHING),
    "ODB budget": ("arms={odb: {token_budget: 2048}}", ONE_ARM),
    "ODB buffer": ("arms={odb: {buffer_size: 100}}", ONE_ARM),
    "ODB join": ("arms={odb: {join: false}}", ONE_ARM),
    "ODB ramp": ("arms={odb: {no_warmup: false}}", ONE_ARM),
    "ODB patches": ("arms={odb: {max_patches: 4096}}", ONE_ARM),
    "ODB packed": ("arms={odb: {padding: pack}}", ONE_ARM),
    "fixed batch": ("arms={standard: {fixed_batch_size: 4}}", ONE_ARM),
    "a new arm": ("arms={odb_small: {loader: odb, token_budget: 1024}}", ONE_ARM),
    "lr": ("training={lr: 2e-3}", TRAININGS),
    "epochs": ("training={epochs: 2}", TRAININGS),
    "seed": ("training={seed: 7}", TRAININGS),
    "freezing": ("training={freeze_vision_tower: true}", TRAININGS),
    "loss scaling": ("training={loss_scaling: exact}", TRAININGS),
    "processes": ("training={num_processes: 2}", TRAININGS),
    "machines": ("training={num_machines: 2}", TRAININGS),
    "DeepSpeed": ("training={deepspeed_config: config/ds_z2.json}", TRAININGS),
    "precision of training": ("training={precision: bf16}", {**TRAININGS, "valloss": 3, "mmmu": 3}),
    "optimizer states": (
        "training={precision: bf16, optimizer_states: 16bit}",
        {**TRAININGS, "valloss": 3, "mmmu": 3},
    ),
    "train size": ("split={train_size: 100}", {**TRAININGS, "data_report": 1}),
    "split seed": ("split={split_seed: 3}", {**TRAININGS, "valloss": 3, "data_report": 1}),
    "longest sample": ("model={max_length: 1024}", VALIDATION),
    "largest image": ("model={image_max_pixels: 1024}", WITH_IMAGES),
    "model seed": ("model={seed: 1}", MODEL),
    "bad records": ("data={on_bad_record: drop}", VALIDATION),
    "sizes": ("builder={sizes: 100}", EVERYTHING),
    "builder ref": ("builder={ref: v2}", {**EVERYTHING, "clone_dataset_builder": 1}),
    "subjects": ("evaluation={mmmu: {subjects: [Math]}}", MMMU),
    "protocol": ("evaluation={mmmu: {protocol: inline}}", MMMU),
    "validation loss": ("evaluation={valloss: {precision: bf16}}", VALLOSS),
    "samples of the evaluations": ("evaluation={max_samples: 5}", {**VALLOSS, "mmmu": 3}),
    "report": ("report={level: 0.9}", COMPARE),
    "baseline off": ("evaluation={untrained_baseline: false}", COMPARE),
    # How a result is computed, not what it is.
    "workers": ("training={num_workers: 3}", NOTHING),
    "prefetch": ("arms={odb: {prefetch_factor: 8}}", NOTHING),
    "port": ("training={master_port: 29611}", NOTHING),
    "trackers": ("training={log_with: tensorboard}", NOTHING),
    "resume points": ("training={checkpoint_every_samples: 10}", NOTHING),
    "no more saving": ("training={save_final_model: false}", NOTHING),
    "performance": ("performance=reference", NOTHING),
    "evaluation processes": ("evaluation={num_processes: 2}", NOTHING),
    "validation-loss batches": ("evaluation={valloss: {token_budget: 9}}", NOTHING),
    "MMMU batches": ("evaluation={mmmu: {batch_token_budget: 9}}", NOTHING),
    "validation processes": ("data={workers: 1}", NOTHING),
    "stage cores": ("resources={train: {threads: 1}}", NOTHING),
    "stage memory and time": ("resources={evaluate: {mem_mb: 99, runtime: 5}}", NOTHING),
    "device": ("device=cuda", NOTHING),
    "logs": ("log_root=elsewhere", NOTHING),
}


@pytest.mark.parametrize("name", ROWS)
def test_change_of_a_key(plan: Callable[..., Plan], name: str) -> None:
    setting, expected = ROWS[name]
    answer = plan("all", *(["--config", setting] if setting else []))
    assert answer.status == 0, answer.text
    assert answer.jobs == expected, answer.text


def test_the_arm_that_changed_is_the_one_that_trains(plan: Callable[..., Plan]) -> None:
    answer = plan("all", "--config", "arms={odb: {token_budget: 2048}}")
    assert "Training arm odb" in answer.messages
    assert "Training arm standard" not in answer.messages
    assert "Params have changed" in answer.text


def test_variables_do_what_keys_do(plan: Callable[..., Plan]) -> None:
    assert plan("all", env={"ODB_MM_MIX_TOKEN_BUDGET": "2048"}).jobs == ONE_ARM
    assert plan("all", env={"ODB_MM_MIX_NUM_WORKERS": "3"}).jobs == NOTHING
    assert plan("all", env={"ODB_MM_MIX_TOKEN_BUDGET": "1536"}).jobs == NOTHING


def test_cores_and_limits_rerun_nothing(plan: Callable[..., Plan]) -> None:
    assert plan("all", "--cores", "1", "--resources", "gpu=8", "mem_mb=100000").jobs == NOTHING


def test_comment_order_and_touch_rerun_nothing(finished_copy: Path) -> None:
    import yaml

    file = finished_copy / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    file.write_text("# another comment\n" + yaml.safe_dump(dict(reversed(list(settings.items())))))
    assert dry_run(finished_copy, "all").jobs == NOTHING


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("train_accelerate", TRAININGS),
        ("eval_valloss", VALLOSS),
        ("eval_benchmark", MMMU),
        ("compare", COMPARE),
        ("data_report", {"data_report": 1, "compare": 1, "all": 1}),
        ("validate_tmdb", VALIDATION),
        ("prepare_benchmark", {**MMMU, "prepare_benchmark": 1}),
    ],
)
def test_raised_code_version(finished_copy: Path, program: str, expected: dict[str, int]) -> None:
    write_program(finished_copy / "workflow_scripts", program, version=2)
    assert dry_run(finished_copy, "all").jobs == expected


def test_edited_program_with_the_same_version_reruns_nothing(finished_copy: Path) -> None:
    with open(finished_copy / "workflow_scripts" / "train_accelerate.py", "a") as program:
        program.write("# a comment\n")
    assert dry_run(finished_copy, "all").jobs == NOTHING


def test_deepspeed_content_counts_not_its_name(finished_copy: Path) -> None:
    shutil.copy(finished_copy / "config" / "ds_z2.json", finished_copy / "config" / "same.json")
    first = "training={deepspeed_config: config/ds_z2.json}"
    done = snakemake(finished_copy, "all", "--config", first)
    assert done.returncode == 0, done.stdout
    same = dry_run(finished_copy, "all", "--config", "training={deepspeed_config: config/same.json}")
    assert same.jobs == NOTHING
    (finished_copy / "config" / "same.json").write_text('{"zero_optimization": {"stage": 1}}')
    other = dry_run(finished_copy, "all", "--config", "training={deepspeed_config: config/same.json}")
    assert other.jobs == TRAININGS


def test_rebuilt_equal_data_trains_nothing(finished_copy: Path, tmp_path: Path) -> None:
    """A new builder ref builds again; the TMDB is the same, so the run ends there."""
    calls = tmp_path / "calls"
    done = snakemake(finished_copy, "all", "--config", "builder={ref: v2}", env={"STUB_CALLS": str(calls)})
    assert done.returncode == 0, done.stdout
    called = [line.split('"')[1] for line in calls.read_text().splitlines()]
    assert called == ["clone_dataset_builder", "build_tmdb"]
    assert dry_run(finished_copy, "all", "--config", "builder={ref: v2}").jobs == NOTHING


def test_rebuilt_other_data_trains_again(finished_copy: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    done = snakemake(finished_copy, "all", "--config", "builder={sizes: 100}", env={"STUB_CALLS": str(calls)})
    assert done.returncode == 0, done.stdout
    called = [line.split('"')[1] for line in calls.read_text().splitlines()]
    assert called.count("train_accelerate") == 2
    assert called.count("eval_valloss") == 3


def test_switching_saving_on_trains_again(finished_copy: Path) -> None:
    done = snakemake(finished_copy, "train_odb", "--config", "training={save_final_model: false, lr: 3e-3}")
    assert done.returncode == 0, done.stdout
    kept = dry_run(finished_copy, "train_odb", "--config", "training={save_final_model: true, lr: 3e-3}")
    # The folder held a saved model, so the second training saved one too.
    assert "train" not in kept.jobs
