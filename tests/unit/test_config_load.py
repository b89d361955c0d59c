"""Configuration: layers and their order, faults, and the generated documents."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from odb_workflow.config.document import README_FILE, SCHEMA_FILE, readme_text, schema_text
from odb_workflow.config.load import all_keys, flatten, load_config, read_yaml
from odb_workflow.config.schema import arm_name_fault
from odb_workflow.runtime.errors import UserError
from odb_workflow.workflow.flags import arm_flags


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A checkout whose configuration files may be changed."""
    shutil.copy(repository / "config.yaml", tmp_path / "config.yaml")
    shutil.copytree(repository / "config", tmp_path / "config")
    return tmp_path


def faults(checkout: Path, settings: dict, environment: dict | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(checkout, environment=environment or {}, command_line=settings)
    return str(caught.value)


def test_embedded_default(repository: Path) -> None:
    config = load_config(repository, environment={}).config
    assert (config.run, config.device, config.model.path) == ("embedded", "cpu", "embedded")
    assert list(config.arms) == ["odb", "standard"]
    assert config.arms["odb"].no_warmup is True
    assert config.arms["standard"].fixed_batch_size == 8
    assert (config.training.precision, config.training.deepspeed_config) == ("fp32", None)
    assert config.split.train_size * config.training.epochs >= 20_000
    assert config.evaluation.untrained_baseline


def test_real_preset_has_the_published_settings(repository: Path) -> None:
    config = load_config(repository, environment={"ODB_MM_MIX_MODEL": "Qwen/Qwen3-VL-2B-Instruct"}).config
    flat = flatten(config.model_dump())
    expected = {
        "run": "accelerate-real",
        "device": "cuda",
        "model.path": "Qwen/Qwen3-VL-2B-Instruct",
        "data.dir": "data/mm-mix-tmdb",
        "builder.kind": "git",
        "builder.checkout": ".deps/build-mm-mix-dataset",
        "split.train_size": 128,
        "split.val_size": 0.05,
        "split.split_seed": 42,
        "split.mode": "lf_val_size",
        "training.num_processes": 1,
        "training.num_workers": 4,
        "training.loss_scaling": "label_tokens",
        "training.lr": 1e-5,
        "training.lr_scheduler": "cosine",
        "training.warmup_ratio": 0.03,
        "training.max_grad_norm": 4.0,
        "training.seed": 42,
        "training.epochs": 1,
        "training.gradient_checkpointing": "on",
        "training.deepspeed_config": "config/ds_z2.json",
        "training.freeze_vision_tower": True,
        "training.freeze_multimodal_projector": True,
        "training.freeze_language_model": False,
        "training.save_final_model": True,
        "model.max_length": 16384,
        "model.image_max_pixels": 589824,
        "arms.odb.token_budget": 12288,
        "arms.odb.buffer_size": 1024,
        "arms.odb.join": True,
        "arms.odb.no_warmup": False,
        "arms.odb.prefetch_factor": 512,
        "arms.odb.padding": "pad",
        "arms.standard.fixed_batch_size": 1,
        "arms.standard.prefetch_factor": 2,
        "evaluation.mmmu.dataset": "MMMU/MMMU",
        "evaluation.mmmu.split": "validation",
    }
    assert {key: flat[key] for key in expected} == expected


def test_order_of_the_layers(checkout: Path) -> None:
    preset = checkout / "config" / "mine.yaml"
    preset.write_text("training: {lr: 0.5, seed: 5, epochs: 2}\n")
    loaded = load_config(
        checkout,
        environment={"ODB_MM_MIX_SEED": "6", "ODB_MM_MIX_EPOCHS": "3"},
        configfiles=[preset],
        command_line={"training": {"epochs": "4"}},
    )
    training = loaded.config.training
    assert (training.lr, training.seed, training.epochs) == (0.5, 6, 4)
    assert training.max_grad_norm == 4.0
    assert loaded.source("training.lr") == "config/mine.yaml"
    assert loaded.source("training.seed") == "$ODB_MM_MIX_SEED"
    assert loaded.source("training.epochs") == "--config"
    assert loaded.source("training.max_grad_norm") == "config.yaml"


def test_model_variable_selects_the_real_preset_below_other_presets(checkout: Path) -> None:
    preset = checkout / "config" / "mine.yaml"
    preset.write_text("run: mine\n")
    environment = {"ODB_MM_MIX_MODEL": "/models/x"}
    loaded = load_config(checkout, environment=environment, configfiles=[preset])
    assert (loaded.config.run, loaded.config.model.path) == ("mine", "/models/x")
    assert loaded.config.arms["odb"].token_budget == 12288
    assert loaded.presets == ("config/qwen3vl-2b.yaml", "config/mine.yaml")


def test_all_faults_at_once_with_key_value_and_nearest_key(repository: Path) -> None:
    text = faults(
        repository,
        {
            "training": {"lrr": 1, "seed": True, "epochs": "many"},
            "arms": {"odb": {"token_bugdet": 3}, "standard": {"fixed_batch_size": 0}},
            "evaluation": {"mmmu": {"protocol": "v7"}},
            "foo": 1,
        },
    )
    assert "unknown key `training.lrr` (value 1, from --config); did you mean `training.lr`?" in text
    assert "`training.seed` = True, from --config: a number is expected, not a boolean" in text
    assert "`training.epochs` = 'many'" in text
    assert "did you mean `arms.odb.token_budget`?" in text
    assert "`arms.standard.fixed_batch_size` = 0" in text
    assert "`evaluation.mmmu.protocol` = 'v7'" in text
    assert "unknown key `foo`" in text


def test_key_in_the_wrong_block_is_pointed_to_its_place(repository: Path) -> None:
    assert "did you mean `split.train_size`?" in faults(repository, {"training": {"train_size": 5}})


def test_wrong_loader_kind_names_the_kinds(repository: Path) -> None:
    text = faults(repository, {"arms": {"x": {"loader": "ods"}}})
    assert "`arms.x`" in text
    for kind in ("odb", "standard", "length_grouped", "token_budget"):
        assert kind in text


def test_missing_key(checkout: Path) -> None:
    file = checkout / "config.yaml"
    file.write_text(re.sub(r"(?m)^  path: embedded\n", "", file.read_text()))
    with pytest.raises(UserError, match=r"missing key `model\.path`"):
        load_config(checkout, environment={})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"builder": {"kind": "git"}}, "builder.repo is needed"),
        ({"builder": {"kind": "hub"}}, "builder.sources is needed"),
        ({"split": {"mode": "tail"}}, "split.val_start is needed"),
        ({"split": {"val_size": 1.5}}, "must be whole"),
        ({"training": {"precision": "fp16"}}, "needs device cuda"),
        ({"training": {"optimizer_states": "16bit"}}, "16bit needs precision bf16 and no DeepSpeed"),
        ({"run": "a b"}, "letters, digits, - and _ only"),
        ({"seeds": [1, 1]}, "a seed stands twice"),
        ({"training": {"lr": float("nan")}}, "finite number"),
        ({"training": {"lr": -1}}, "greater than 0"),
        ({"report": {"level": 1.0}}, "less than 1"),
        ({"arms": {"odb": None, "standard": None}}, "at least 1"),
    ],
)
def test_values_that_do_not_fit(repository: Path, settings: dict, message: str) -> None:
    assert message in faults(repository, settings)


@pytest.mark.parametrize(
    "url", ["https://me:s3cret@host/b.git", "https://s3cret@host/b.git", "ssh://me:s3cret@h/b"]
)
def test_a_password_in_the_repository_is_refused_and_not_repeated(repository: Path, url: str) -> None:
    text = faults(repository, {"builder": {"kind": "git", "repo": url}})
    assert "must hold no password or token" in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    "url", ["git@host:o/b.git", "ssh://git@host:22/b.git", "https://host/b.git", "../b@1.bundle"]
)
def test_repositories_without_password(repository: Path, url: str) -> None:
    settings = {"builder": {"kind": "git", "repo": url}}
    assert load_config(repository, environment={}, command_line=settings).config.builder.repo == url


@pytest.mark.parametrize("name", ["Odb", "2x", "a-b", "a b", "", "é"])
def test_arm_names_have_a_form(name: str) -> None:
    assert "lower-case" in (arm_name_fault(name) or "")


@pytest.mark.parametrize(
    "name", ["train", "compare", "all", "data", "valloss", "untrained", "external", "report"]
)
def test_arm_names_that_are_taken(repository: Path, name: str) -> None:
    assert arm_name_fault(name) is not None
    assert f"`{name}`" in faults(repository, {"arms": {name: {"loader": "standard"}}})


def test_arm_whose_targets_are_free() -> None:
    assert arm_name_fault("odb_24k") is None


def test_a_new_loader_kind_keeps_nothing_of_the_old_arm(repository: Path) -> None:
    settings = {"arms": {"odb": {"loader": "standard", "fixed_batch_size": 3}}}
    arm = load_config(repository, environment={}, command_line=settings).config.arms["odb"]
    assert (arm.loader, arm.fixed_batch_size) == ("standard", 3)


@pytest.mark.parametrize("arm", ["odb", "standard"])
def test_the_batch_size_may_be_left_to_the_training(repository: Path, arm: str) -> None:
    settings = {"arms": {arm: {"loader": "standard", "fixed_batch_size": "auto"}}}
    config = load_config(repository, environment={}, command_line=settings).config
    assert config.arms[arm].fixed_batch_size == "auto"
    assert "--fixed-batch-size auto" in " ".join(arm_flags(config.arms[arm]))


def test_a_preset_takes_an_arm_away(repository: Path) -> None:
    config = load_config(repository, environment={}, command_line={"arms": {"standard": None}}).config
    assert list(config.arms) == ["odb"]


def test_yaml_key_twice_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("training:\n  lr: 1\n  lr: 2\n")
    with pytest.raises(UserError, match=r"`lr` stands twice[\s\S]*x\.yaml, line 3"):
        read_yaml(file)


def test_yaml_faults(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("a: [1\n")
    with pytest.raises(UserError, match="not valid YAML"):
        read_yaml(file)
    file.write_text("- a\n")
    with pytest.raises(UserError, match="`key: value` lines"):
        read_yaml(file)
    with pytest.raises(UserError, match=r"cannot read[\s\S]*none\.yaml"):
        read_yaml(tmp_path / "none.yaml")


def test_yaml_scalars_mean_what_people_write(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("a: 1e-5\nb: on\nc: true\nd: 2.5E+3\ne: 12\nf: no\n")
    assert read_yaml(file) == {"a": 1e-5, "b": "on", "c": True, "d": 2500.0, "e": 12, "f": "no"}


def test_presets_in_the_checkout_are_valid(repository: Path) -> None:
    for file in ("qwen3vl-2b.yaml", "batching-study.yaml"):
        load_config(repository, environment={}, configfiles=[repository / "config" / file])


def test_batching_study_has_five_arms_of_all_kinds(repository: Path) -> None:
    config = load_config(
        repository, environment={}, configfiles=[repository / "config" / "batching-study.yaml"]
    ).config
    assert len(config.arms) == 5
    assert {arm.loader for arm in config.arms.values()} == {
        "standard",
        "odb",
        "length_grouped",
        "token_budget",
    }
    assert {arm.padding for arm in config.arms.values()} == {"pad", "pack"}


def test_config_file_holds_every_key(repository: Path) -> None:
    written = set(flatten(read_yaml(repository / "config.yaml")))
    expected = {
        key
        for key in all_keys()
        if not key.startswith("arms") and not any(k.startswith(f"{key}.") for k in all_keys())
    }
    # Resources are written per stage in one line.
    assert {key for key in expected if key not in written} == set()


def test_generated_documents_are_current(repository: Path) -> None:
    assert (repository / SCHEMA_FILE).read_text() == schema_text(), (
        "run python -m odb_workflow.config.document"
    )
    assert (repository / README_FILE).read_text() == readme_text(), (
        "run python -m odb_workflow.config.document"
    )


def test_schema_accepts_the_files_and_refuses_a_typo(repository: Path) -> None:
    import jsonschema

    schema = yaml.safe_load((repository / SCHEMA_FILE).read_text())
    for name in ("config.yaml", "config/qwen3vl-2b.yaml", "config/batching-study.yaml"):
        jsonschema.validate(read_yaml(repository / name), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"training": {"lrr": 1}}, schema)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("? [a, b]\n: 1\n", "line 1"),
        ("training: &a\n  lr: 0.1\n  more: *a\n", "an anchor holds itself"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_odd_yaml_is_an_error_that_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_yaml(file)
    assert str(file) in str(caught.value)


def test_a_date_is_text(tmp_path: Path) -> None:
    (tmp_path / "date.yaml").write_text("run: 2026-13-41\n")
    assert read_yaml(tmp_path / "date.yaml") == {"run": "2026-13-41"}


def test_an_unknown_reference_arm_and_a_seed_out_of_range_are_told_before_any_training(
    checkout: Path,
) -> None:
    text = faults(checkout, {"report": {"reference_arm": "nope"}, "seeds": [1, 2**32]})
    assert "report.reference_arm 'nope' is no arm of this run; arms: odb, standard, untrained" in text
    assert "is above 4294967295" in text
    faults_of_training_seed = faults(checkout, {"training": {"seed": 2**32}})
    assert "is above 4294967295" in faults_of_training_seed
    for reference in ("odb", "untrained"):
        load_config(checkout, environment={}, command_line={"report": {"reference_arm": reference}})


def test_speed_switches_are_checked_before_any_job_and_without_torch(checkout: Path) -> None:
    text = faults(checkout, {"performance": {"compile_layer": True}})
    assert "unknown switch 'compile_layer' (performance.compile_layer); known: attention, " in text
    assert "compile_layers is 'yes'" in faults(checkout, {"performance": {"compile_layers": "yes"}})
    switches = {"compile_layers": False, "checkpointing": 2}
    loaded = load_config(checkout, environment={}, command_line={"performance": switches})
    assert loaded.config.performance == switches
    program = "import sys, odb_workflow.config.load; sys.exit('torch' in sys.modules)"
    folder = Path(__file__).parents[2] / "workflow_scripts"
    assert subprocess.run([sys.executable, "-c", program], cwd=folder).returncode == 0


def test_an_unknown_block_names_its_file(repository: Path, tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("trainin: {epochs: 1}\n")
    with pytest.raises(UserError) as caught:
        load_config(repository, environment={}, configfiles=[str(preset)])
    assert f"unknown key `trainin` (value {{'epochs': 1}}, from {preset}); did you mean `training`?" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("subjects", "dataset", "fine"),
    [
        (["Nope", "math"], "embedded", False),
        (["Math"], "embedded", True),
        (["Nope"], "data/my-own-questions", True),
    ],
)
def test_subjects_that_mmmu_does_not_have(checkout: Path, subjects: list, dataset: str, fine: bool) -> None:
    settings = {"evaluation": {"mmmu": {"subjects": subjects, "dataset": dataset}}}
    if fine:
        assert (
            load_config(checkout, environment={}, command_line=settings).config.evaluation.mmmu.subjects
            == subjects
        )
        return
    text = faults(checkout, settings)
    assert "evaluation.mmmu" in text
    assert "no such subject: 'Nope'" in text and "'math' (nearest: Ma" in text
    assert "choose from: Accounting, Agriculture" in text
