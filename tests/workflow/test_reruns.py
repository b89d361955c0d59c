"""What reruns when: the table of the documentation, row by row, asked of Snakemake on a finished run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Plan, dry_run, snakemake
from .stub_programs import write_program

pytestmark = pytest.mark.workflow

PARAMS = "params have changed since last execution"
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

ROWS: dict[str, tuple[str, dict[str, int]] | tuple[str, dict[str, int], str]] = {
    # change: (setting, jobs, rules that run for a reason of their own; all others follow from these)
    "nothing changed": ("", NOTHING),
    "ODB budget": ("arms={odb: {token_budget: 2048}}", ONE_ARM, "train"),
    "ODB buffer": ("arms={odb: {buffer_size: 100}}", ONE_ARM, "train"),
    "ODB join": ("arms={odb: {join: false}}", ONE_ARM, "train"),
    "ODB ramp": ("arms={odb: {no_warmup: false}}", ONE_ARM, "train"),
    "ODB patches": ("arms={odb: {max_patches: 4096}}", ONE_ARM, "train"),
    "ODB packed": ("arms={odb: {padding: pack}}", ONE_ARM, "train"),
    "ODB group order": ("arms={odb: {group_order_flip: true}}", ONE_ARM, "train"),
    "fixed batch": ("arms={standard: {fixed_batch_size: 4}}", ONE_ARM, "train"),
    "fixed batch packed": ("arms={standard: {padding: pack}}", ONE_ARM, "train"),
    "another loader": ("arms={standard: {loader: length_grouped}}", ONE_ARM, "train"),
    "a new arm": (
        "arms={odb_small: {loader: odb, token_budget: 1024}}",
        ONE_ARM,
        "compare mmmu train valloss",
    ),
    "lr": ("training={lr: 2e-3}", TRAININGS, "train"),
    "epochs": ("training={epochs: 2}", TRAININGS, "train"),
    "steps at most": ("training={max_steps: 9}", TRAININGS, "train"),
    "scheduler": ("training={lr_scheduler: linear}", TRAININGS, "train"),
    "warm-up": ("training={warmup_ratio: 0.1}", TRAININGS, "train"),
    "schedule basis": ("training={schedule_basis: label_tokens}", TRAININGS, "train"),
    "gradient clipping": ("training={max_grad_norm: 1}", TRAININGS, "train"),
    "weight decay": ("training={weight_decay: 0.1}", TRAININGS, "train"),
    "accumulation": ("training={gradient_accumulation_steps: 2}", TRAININGS, "train"),
    "gradient checkpointing": ("training={gradient_checkpointing: on}", TRAININGS, "train"),
    "seed": ("training={seed: 7}", TRAININGS, "train"),
    "freezing": ("training={freeze_vision_tower: true}", TRAININGS, "train"),
    "freezing the projector": ("training={freeze_multimodal_projector: true}", TRAININGS, "train"),
    "freezing the language model": ("training={freeze_language_model: true}", TRAININGS, "train"),
    "trainable keywords": ("training={trainable_keywords: [head]}", TRAININGS, "train"),
    "attention": ("model={attn_implementation: eager}", TRAININGS, "train"),
    "loss scaling": ("training={loss_scaling: exact}", TRAININGS, "train"),
    "processes": ("training={num_processes: 2}", TRAININGS, "train"),
    "machines": ("training={num_machines: 2}", TRAININGS, "train"),
    "DeepSpeed": ("training={deepspeed_config: config/ds_z2.json}", TRAININGS, "train"),
    "precision of training": (
        "training={precision: bf16}",
        {**TRAININGS, "valloss": 3, "mmmu": 3},
        "mmmu train valloss",
    ),
    "train size": ("split={train_size: 100}", {**TRAININGS, "data_report": 1}, "data_report train"),
    "split seed": (
        "split={split_seed: 3}",
        {**TRAININGS, "valloss": 3, "data_report": 1},
        "data_report train valloss",
    ),
    "split mode": (
        "split={mode: prefix}",
        {**TRAININGS, "valloss": 3, "data_report": 1},
        "data_report train valloss",
    ),
    "size of the validation part": (
        "split={val_size: 0.1}",
        {**TRAININGS, "valloss": 3, "data_report": 1},
        "data_report train valloss",
    ),
    "longest sample": ("model={max_length: 1024}", VALIDATION, "validate_tmdb"),
    "largest image": ("model={image_max_pixels: 1024}", WITH_IMAGES, "mmmu validate_tmdb"),
    "model seed": ("model={seed: 1}", MODEL, "prepare_model"),
    "model revision": ("model={revision: abc}", MODEL, "prepare_model"),
    "bad records": ("data={on_bad_record: drop}", VALIDATION, "validate_tmdb"),
    "sizes": ("builder={sizes: 100}", EVERYTHING, "build_tmdb"),
    "seed of the builder": ("builder={seed: 3}", EVERYTHING, "build_tmdb"),
    "arguments of the builder": ("builder={args: [--x]}", EVERYTHING, "build_tmdb"),
    "builder ref": ("builder={ref: v2}", {**EVERYTHING, "clone_dataset_builder": 1}, "clone_dataset_builder"),
    "subjects": ("evaluation={mmmu: {subjects: [Math]}}", MMMU, "mmmu"),
    "protocol": ("evaluation={mmmu: {protocol: inline}}", MMMU, "mmmu"),
    "split of MMMU": ("evaluation={mmmu: {split: dev}}", MMMU, "mmmu"),
    "precision of MMMU": ("evaluation={mmmu: {precision: bf16}}", MMMU, "mmmu"),
    "another MMMU": ("evaluation={mmmu: {dataset: MMMU/MMMU}}", MMMU, "mmmu"),
    "size of the embedded MMMU": (
        "evaluation={mmmu: {rows: 30}}",
        {**MMMU, "prepare_benchmark": 1},
        "prepare_benchmark",
    ),
    "validation loss": ("evaluation={valloss: {precision: bf16}}", VALLOSS, "valloss"),
    "samples of the evaluations": ("evaluation={max_samples: 5}", {**VALLOSS, "mmmu": 3}, "mmmu valloss"),
    "report": ("report={level: 0.9}", COMPARE, "compare"),
    "reference arm": ("report={reference_arm: odb}", COMPARE, "compare"),
    "baseline off": ("evaluation={untrained_baseline: false}", COMPARE, "compare"),
    # How a result is computed, not what it is.
    "workers": ("training={num_workers: 3}", NOTHING),
    "prefetch": ("arms={odb: {prefetch_factor: 8}}", NOTHING),
    "port": ("training={master_port: 29611}", NOTHING),
    "trackers": ("training={log_with: tensorboard}", NOTHING),
    "resume points": ("training={checkpoint_every_samples: 10}", NOTHING),
    "time between resume points": ("training={checkpoint_every_minutes: 1}", NOTHING),
    "copies of the data": ("data={source_dir: a, local_dir: b}", NOTHING),
    "trust": ("model={trust_remote_code: true}", NOTHING),
    "no more saving": ("training={save_final_model: false}", NOTHING),
    "performance": ("performance=reference", NOTHING),
    "evaluation processes": ("evaluation={num_processes: 2}", NOTHING),
    "validation-loss batches": ("evaluation={valloss: {token_budget: 9}}", NOTHING),
    "MMMU batches": ("evaluation={mmmu: {batch_token_budget: 9}}", NOTHING),
    "validation processes": ("data={workers: 1}", NOTHING),
    "stage cores": ("resources={train: {threads: 1}}", NOTHING),
    "stage memory and time": ("resources={evaluate: {mem_mb: 99, runtime: 5}}", NOTHING),
    "stage GPUs": ("resources={evaluate: {gpu: 2}}", NOTHING),
    "device": ("device=cuda", NOTHING),
    "logs": ("log_root=elsewhere", NOTHING),
}


@pytest.mark.parametrize("name", ROWS)
def test_change_of_a_key(plan: Callable[..., Plan], name: str) -> None:
    setting, expected, *causes = ROWS[name]
    answer = plan("all", *(["--config", setting] if setting else []))
    assert answer.status == 0, answer.text
    assert answer.jobs == expected, answer.text
    assert answer.causes() == set(" ".join(causes).split()), answer.text
    if causes and name != "a new arm":
        assert answer.reasons[PARAMS] == answer.causes(), answer.text


def test_the_arm_that_changed_is_the_one_that_trains(plan: Callable[..., Plan]) -> None:
    answer = plan("all", "--config", "arms={odb: {token_budget: 2048}}")
    assert "Training arm odb" in answer.messages
    assert "Training arm standard" not in answer.messages
    assert "Params have changed" in answer.text


def test_variables_do_what_keys_do(plan: Callable[..., Plan]) -> None:
    assert plan("all", env={"ODB_MM_MIX_TOKEN_BUDGET": "2048"}).jobs == ONE_ARM
    assert plan("all", env={"ODB_MM_MIX_NUM_WORKERS": "3"}).jobs == NOTHING
    assert plan("all", env={"ODB_MM_MIX_TOKEN_BUDGET": "1536"}).jobs == NOTHING


def test_keys_that_count_beside_others_only(finished_copy: Path) -> None:
    def settings(**changed: str) -> list[str]:
        values = {"states": "float32", "val_start": "4000", "bad": "0.05", "batch": "4", "budget": "999"}
        values |= changed
        return [
            "--config",
            f"training={{precision: bf16, optimizer_states: {values['states']}}}",
            f"split={{mode: tail, val_start: {values['val_start']}}}",
            f"data={{on_bad_record: drop, max_bad_fraction: {values['bad']}}}",
            f"arms={{grouped: {{loader: length_grouped, fixed_batch_size: {values['batch']}}},"
            f" oracle: {{loader: token_budget, token_budget: {values['budget']}}}}}",
        ]

    done = snakemake(finished_copy, "all", *settings())
    assert done.returncode == 0, done.stdout
    assert dry_run(finished_copy, "all", *settings()).jobs == NOTHING

    def change(**changed: str) -> tuple[int, set[str]]:
        answer = dry_run(finished_copy, "all", *settings(**changed))
        return answer.jobs["train"], answer.causes()

    assert change(states="16bit") == (4, {"train"})
    assert change(val_start="3900") == (4, {"train", "valloss", "data_report"})
    assert change(bad="0.1") == (4, {"validate_tmdb"})
    assert change(batch="2") == (1, {"train"})
    assert change(budget="1024") == (1, {"train"})


def test_another_model_and_its_processor(finished_copy: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    given = ["--config", f"model={{path: {model}}}"]
    assert dry_run(finished_copy, "all", *given).jobs == MODEL
    given.append("output_root=outputs/other")
    done = snakemake(finished_copy, "all", *given)
    assert done.returncode == 0, done.stdout
    (model / "preprocessor_config.json").touch()
    assert dry_run(finished_copy, "all", *given).jobs == NOTHING
    (model / "preprocessor_config.json").write_text('{"size": 1}')
    answer = dry_run(finished_copy, "all", *given)
    assert answer.jobs == MODEL
    assert answer.causes() == {"prepare_model"}


def test_list_of_sources(finished_copy: Path) -> None:
    sources = finished_copy / "sources.yaml"
    sources.write_text("sources: []\n")
    given = ["--config", "builder={kind: json, sources: sources.yaml}"]
    done = snakemake(finished_copy, "data", *given)
    assert done.returncode == 0, done.stdout
    sources.touch()
    assert "build_tmdb" not in dry_run(finished_copy, "data", *given).jobs
    sources.write_text("sources: [{name: a}]\n")
    answer = dry_run(finished_copy, "data", *given)
    assert "build_tmdb" in answer.reasons[PARAMS]


def test_cores_and_limits_rerun_nothing(plan: Callable[..., Plan]) -> None:
    assert plan("all", "--cores", "1", "--resources", "gpu=8", "mem_mb=100000").jobs == NOTHING


@pytest.mark.parametrize(
    "arguments",
    [
        ["--default-resources", "slurm_partition=long", "slurm_account=us", "runtime=7"],
        ["--set-resources", "train:runtime=9", "train:mem_mb=99", "train:slurm_extra='--qos=high'"],
        ["--set-threads", "train=1"],
    ],
)
def test_cluster_options_rerun_nothing(plan: Callable[..., Plan], arguments: list[str]) -> None:
    assert plan("all", *arguments).jobs == NOTHING


def test_profile_of_a_cluster_reruns_nothing(plan: Callable[..., Plan]) -> None:
    assert plan("all", "--workflow-profile", "profiles/slurm").jobs == NOTHING


def test_devices_that_are_there_rerun_nothing(plan: Callable[..., Plan]) -> None:
    assert plan("all", env={"CUDA_VISIBLE_DEVICES": "0,1,2"}).jobs == NOTHING


def test_versions_of_packages_rerun_nothing(finished_copy: Path) -> None:
    for file in (finished_copy / "envs").iterdir():
        file.write_text(file.read_text().replace("==", ">="))
    assert dry_run(finished_copy, "all").jobs == NOTHING


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
        ("prepare_model", MODEL),
        ("build_tmdb", EVERYTHING),
        ("clone_dataset_builder", {**EVERYTHING, "clone_dataset_builder": 1}),
    ],
)
def test_raised_code_version(finished_copy: Path, program: str, expected: dict[str, int]) -> None:
    write_program(finished_copy / "workflow_scripts", program, version=2)
    answer = dry_run(finished_copy, "all")
    assert answer.jobs == expected
    stage = {"train_accelerate": "train", "eval_valloss": "valloss", "eval_benchmark": "mmmu"}
    assert answer.causes() == answer.reasons[PARAMS] == {stage.get(program, program)}


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


def test_data_that_were_deleted_are_told_and_made_again(finished_copy: Path) -> None:
    """Without the TMDB Snakemake cannot look at what stands behind it, and compares no settings there."""
    assert "is gone" not in dry_run(finished_copy, "all").text
    shutil.rmtree(finished_copy / "data/embedded-tmdb")
    (finished_copy / "data/embedded-tmdb.identity.json").unlink()
    assert "note: data/embedded-tmdb or its identity file is gone" in dry_run(finished_copy, "all").text
    done = snakemake(finished_copy, "data")
    assert done.returncode == 0, done.stdout
    assert "Checking every record" not in done.stdout  # the same data again
    answer = dry_run(finished_copy, "all", "--config", "training={lr: 2e-3}")
    assert answer.jobs == TRAININGS
    assert "is gone" not in answer.text
