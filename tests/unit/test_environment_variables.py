"""Environment variables of the published example."""

from __future__ import annotations

from pathlib import Path

import pytest
from odb_workflow.config.environment import VARIABLES, environment_settings
from odb_workflow.config.load import all_keys, flatten, load_config
from odb_workflow.runtime.errors import UserError

PUBLISHED = [
    "MODEL",
    "DATA",
    "OUTPUT_ROOT",
    "RECIPE_ROOT",
    "MAX_STEPS",
    "TRAIN_SIZE",
    "MAX_LENGTH",
    "IMAGE_MAX_PIXELS",
    "TOKEN_BUDGET",
    "BUFFER_SIZE",
    "NUM_PROCESSES",
    "MASTER_PORT",
    "ODB_PREFETCH_FACTOR",
    "STANDARD_PREFETCH_FACTOR",
    "TRAINABLE_KEYWORDS",
    "DEEPSPEED",
    "SAVE_FINAL_MODEL",
    "LR",
    "SEED",
    "EPOCHS",
    "NUM_WORKERS",
    "VAL_SIZE",
    "SPLIT_SEED",
    "SPLIT_MODE",
    "LOSS_SCALING",
    "MAX_PATCHES",
    "FIXED_BATCH_SIZE",
    "GRADIENT_CHECKPOINTING",
    "ATTN_IMPLEMENTATION",
    "MAX_GRAD_NORM",
    "WARMUP_RATIO",
    "FREEZE_VISION_TOWER",
    "FREEZE_MULTIMODAL_PROJECTOR",
    "FREEZE_LANGUAGE_MODEL",
    "SOURCE_DATA",
    "LOCAL_DATA",
]
EVALUATION = ["CHECKPOINT", "OUTPUT_ROOT", "MAX_SAMPLES", "SUBJECTS"]


def test_every_documented_variable_has_a_key() -> None:
    names = {
        *(f"ODB_MM_MIX_{name}" for name in PUBLISHED),
        *(f"ODB_ACCEL_EVAL_{name}" for name in EVALUATION),
    }
    assert names <= set(VARIABLES)


def test_every_key_of_the_table_exists() -> None:
    known = set(all_keys())
    for key in VARIABLES.values():
        parts = key.split(".")
        assert (f"arms.NAME.{parts[2]}" if parts[0] == "arms" else key) in known, key


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("ODB_MM_MIX_TOKEN_BUDGET", "24576", "arms.odb.token_budget", 24576),
        ("ODB_MM_MIX_FIXED_BATCH_SIZE", "2", "arms.standard.fixed_batch_size", 2),
        ("ODB_MM_MIX_FIXED_BATCH_SIZE", "auto", "arms.standard.fixed_batch_size", "auto"),
        ("ODB_MM_MIX_LR", "2e-5", "training.lr", 2e-5),
        ("ODB_MM_MIX_EPOCHS", "0.5", "training.epochs", 0.5),
        (
            "ODB_MM_MIX_TRAINABLE_KEYWORDS",
            "lm_head, embed",
            "training.trainable_keywords",
            ["lm_head", "embed"],
        ),
        ("ODB_MM_MIX_SAVE_FINAL_MODEL", "0", "training.save_final_model", False),
        ("ODB_MM_MIX_FREEZE_VISION_TOWER", "1", "training.freeze_vision_tower", True),
        ("ODB_MM_MIX_DEEPSPEED", "0", "training.deepspeed_config", None),
        ("ODB_MM_MIX_DEEPSPEED", "none", "training.deepspeed_config", None),
        ("ODB_MM_MIX_DEEPSPEED", "1", "training.deepspeed_config", "config/ds_z2.json"),
        ("ODB_MM_MIX_DEEPSPEED", "my.json", "training.deepspeed_config", "my.json"),
        ("ODB_MM_MIX_GRADIENT_CHECKPOINTING", "1", "training.gradient_checkpointing", "on"),
        ("ODB_MM_MIX_GRADIENT_CHECKPOINTING", "auto", "training.gradient_checkpointing", "auto"),
        ("ODB_MM_MIX_VAL_SIZE", "100", "split.val_size", 100),
        ("ODB_ACCEL_EVAL_SUBJECTS", "Math,Art", "evaluation.mmmu.subjects", ["Math", "Art"]),
        ("ODB_ACCEL_EVAL_MAX_SAMPLES", "7", "evaluation.max_samples", 7),
    ],
)
def test_variable_sets_its_key(repository: Path, variable: str, text: str, key: str, value: object) -> None:
    loaded = load_config(repository, environment={variable: text})
    assert flatten(loaded.config.model_dump())[key] == value
    assert loaded.source(key) == f"${variable}"


def test_empty_variable_counts_as_unset(repository: Path) -> None:
    loaded = load_config(repository, environment={"ODB_MM_MIX_MODEL": "", "ODB_MM_MIX_LR": " "})
    assert (loaded.config.run, loaded.config.training.lr) == ("embedded", 1e-3)


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"ODB_MM_MIX_TOKEN_BUGET=1 \(did you mean ODB_MM_MIX_TOKEN_BUDGET\?\)"
    ):
        environment_settings({"ODB_MM_MIX_TOKEN_BUGET": "1"})


def test_other_variables_are_not_ours() -> None:
    assert environment_settings({"HF_TOKEN": "hf_x", "ODB_LOG_EMITTED_IDS": "x", "PATH": "x"}) == {}


def test_variable_of_an_arm_that_is_not_there(repository: Path, tmp_path: Path) -> None:
    preset = tmp_path / "p.yaml"
    preset.write_text("arms: {odb: null}\n")
    with pytest.raises(UserError, match="has no arm `odb`"):
        load_config(repository, environment={"ODB_MM_MIX_TOKEN_BUDGET": "1"}, configfiles=[preset])


def test_wrong_value_names_the_variable(repository: Path) -> None:
    with pytest.raises(UserError, match=r"`training.lr` = 'fast', from \$ODB_MM_MIX_LR"):
        load_config(repository, environment={"ODB_MM_MIX_LR": "fast"})
