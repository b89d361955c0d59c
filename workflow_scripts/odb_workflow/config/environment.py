"""Environment variables of the published example, and the configuration key of each: one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..runtime.errors import UserError

VARIABLES: dict[str, str] = {
    "ODB_MM_MIX_MODEL": "model.path",
    "ODB_MM_MIX_DATA": "data.dir",
    "ODB_MM_MIX_OUTPUT_ROOT": "output_root",
    "ODB_MM_MIX_RECIPE_ROOT": "builder.checkout",
    "ODB_MM_MIX_MAX_STEPS": "training.max_steps",
    "ODB_MM_MIX_TRAIN_SIZE": "split.train_size",
    "ODB_MM_MIX_MAX_LENGTH": "model.max_length",
    "ODB_MM_MIX_IMAGE_MAX_PIXELS": "model.image_max_pixels",
    "ODB_MM_MIX_TOKEN_BUDGET": "arms.odb.token_budget",
    "ODB_MM_MIX_BUFFER_SIZE": "arms.odb.buffer_size",
    "ODB_MM_MIX_NUM_PROCESSES": "training.num_processes",
    "ODB_MM_MIX_MASTER_PORT": "training.master_port",
    "ODB_MM_MIX_ODB_PREFETCH_FACTOR": "arms.odb.prefetch_factor",
    "ODB_MM_MIX_STANDARD_PREFETCH_FACTOR": "arms.standard.prefetch_factor",
    "ODB_MM_MIX_TRAINABLE_KEYWORDS": "training.trainable_keywords",
    "ODB_MM_MIX_DEEPSPEED": "training.deepspeed_config",
    "ODB_MM_MIX_SAVE_FINAL_MODEL": "training.save_final_model",
    "ODB_MM_MIX_LR": "training.lr",
    "ODB_MM_MIX_SEED": "training.seed",
    "ODB_MM_MIX_EPOCHS": "training.epochs",
    "ODB_MM_MIX_NUM_WORKERS": "training.num_workers",
    "ODB_MM_MIX_VAL_SIZE": "split.val_size",
    "ODB_MM_MIX_SPLIT_SEED": "split.split_seed",
    "ODB_MM_MIX_SPLIT_MODE": "split.mode",
    "ODB_MM_MIX_VAL_START": "split.val_start",
    "ODB_MM_MIX_LOSS_SCALING": "training.loss_scaling",
    "ODB_MM_MIX_SCHEDULE_BASIS": "training.schedule_basis",
    "ODB_MM_MIX_LR_SCHEDULER": "training.lr_scheduler",
    "ODB_MM_MIX_WEIGHT_DECAY": "training.weight_decay",
    "ODB_MM_MIX_GRADIENT_ACCUMULATION_STEPS": "training.gradient_accumulation_steps",
    "ODB_MM_MIX_PRECISION": "training.precision",
    "ODB_MM_MIX_OPTIMIZER_STATES": "training.optimizer_states",
    "ODB_MM_MIX_NUM_MACHINES": "training.num_machines",
    "ODB_MM_MIX_CHECKPOINT_EVERY_SAMPLES": "training.checkpoint_every_samples",
    "ODB_MM_MIX_CHECKPOINT_EVERY_MINUTES": "training.checkpoint_every_minutes",
    "ODB_MM_MIX_LOG_WITH": "training.log_with",
    "ODB_MM_MIX_JOIN": "arms.odb.join",
    "ODB_MM_MIX_NO_WARMUP": "arms.odb.no_warmup",
    "ODB_MM_MIX_GROUP_ORDER_FLIP": "arms.odb.group_order_flip",
    "ODB_MM_MIX_MAX_PATCHES": "arms.odb.max_patches",
    "ODB_MM_MIX_FIXED_BATCH_SIZE": "arms.standard.fixed_batch_size",
    "ODB_MM_MIX_GRADIENT_CHECKPOINTING": "training.gradient_checkpointing",
    "ODB_MM_MIX_ATTN_IMPLEMENTATION": "model.attn_implementation",
    "ODB_MM_MIX_TRUST_REMOTE_CODE": "model.trust_remote_code",
    "ODB_MM_MIX_MAX_GRAD_NORM": "training.max_grad_norm",
    "ODB_MM_MIX_WARMUP_RATIO": "training.warmup_ratio",
    "ODB_MM_MIX_FREEZE_VISION_TOWER": "training.freeze_vision_tower",
    "ODB_MM_MIX_FREEZE_MULTIMODAL_PROJECTOR": "training.freeze_multimodal_projector",
    "ODB_MM_MIX_FREEZE_LANGUAGE_MODEL": "training.freeze_language_model",
    "ODB_MM_MIX_PERFORMANCE": "performance",
    "ODB_MM_MIX_SOURCE_DATA": "data.source_dir",
    "ODB_MM_MIX_LOCAL_DATA": "data.local_dir",
    "ODB_ACCEL_EVAL_CHECKPOINT": "evaluation.checkpoint",
    "ODB_ACCEL_EVAL_OUTPUT_ROOT": "evaluation.output_root",
    "ODB_ACCEL_EVAL_MAX_SAMPLES": "evaluation.max_samples",
    "ODB_ACCEL_EVAL_SUBJECTS": "evaluation.mmmu.subjects",
}
MODEL_VARIABLE = "ODB_MM_MIX_MODEL"
PREFIXES = ("ODB_MM_MIX_", "ODB_ACCEL_EVAL_")
PADDING_VARIABLES = {"ODB_MM_MIX_PADDING": ("arms.odb.padding", "arms.standard.padding")}
# Offline switches of the Hugging Face libraries are honored by those libraries themselves.

VARIABLE_OF_KEY = {key: name for name, key in VARIABLES.items()}
_SWITCH_WORDS = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}


def nested(key: str, value: Any) -> dict[str, Any]:
    """``a.b`` and a value as ``{"a": {"b": value}}``."""
    result: Any = value
    for part in reversed(key.split(".")):
        result = {part: result}
    return result


def environment_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings that the environment makes: configuration key -> text. Variables that are empty count as
    unset.

    Raises:
        UserError: a variable with one of the two prefixes is not known; names the nearest one.
    """
    from .load import nearest

    found: dict[str, str] = {}
    unknown = []
    for name in sorted(environment):
        value = environment[name]
        if not name.startswith(PREFIXES) or not value.strip():
            continue
        if name in VARIABLES:
            found[VARIABLES[name]] = _spelled(name, value.strip())
        elif name in PADDING_VARIABLES:
            found.update({key: value.strip() for key in PADDING_VARIABLES[name]})
        else:
            hint = nearest(name, [*VARIABLES, *PADDING_VARIABLES])
            unknown.append(f"{name}={value}" + (f" (did you mean {hint}?)" if hint else ""))
    if unknown:
        raise UserError(
            f"environment variable not known: {', '.join(unknown)}",
            fix="unset it, or use one of the variables in config/README.md",
        )
    return found


def _spelled(name: str, value: str) -> str:
    # The published example switches checkpointing with 0 and 1.
    if name == "ODB_MM_MIX_GRADIENT_CHECKPOINTING":
        return _SWITCH_WORDS.get(value.lower(), value)
    return value
