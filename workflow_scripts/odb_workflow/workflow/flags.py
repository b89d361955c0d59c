"""Flags of the programs, made from the configuration.

Each function gives either the flags that make a result what it is (the rules track them: a change reruns the
stage)
or those that only say how it is computed (never tracked).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..config.blocks_training import ArmBase
from ..config.schema import Config

Flags = list[str]


def flag(name: str, value: Any) -> Flags:
    """``--name value``; nothing for None and empty lists; numbers in one spelling."""
    option = "--" + name.replace("_", "-")
    if value is None or value == []:
        return []
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [option, ",".join(str(item) for item in value)]
    return [option, number(value)]


def number(value: Any) -> str:
    """Text of a value; 1.0 and 1 are the same setting and so the same text."""
    if isinstance(value, float):
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
    return str(value)


def content_of(path: str | None, checkout: Path) -> str | None:
    """A short hash of a JSON or YAML file's text, so that its content counts and its place does not."""
    if not path:
        return None
    found = find_file(path, checkout)
    if not found.is_file():
        return f"missing {path}"
    text = found.read_text(encoding="utf-8")
    if found.suffix == ".json":
        text = json.dumps(json.loads(text), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_file(path: str, checkout: Path) -> Path:
    """A file named in the configuration: from the working directory, else from the checkout."""
    here = Path(path)
    return here if here.exists() or here.is_absolute() else checkout / here


def builder_flags(config: Config) -> Flags:
    """Tracked flags of ``build_tmdb.py``."""
    builder = config.builder
    flags = flag("kind", builder.kind)
    if builder.kind == "embedded":
        flags += flag("seed", builder.seed)
    if builder.sizes is not None:
        flags += ["--sizes", json.dumps(builder.sizes, sort_keys=True)]
    if builder.args:
        flags += ["--builder-args", json.dumps(builder.args)]
    return flags


def model_flags(config: Config) -> Flags:
    """Tracked flags of ``prepare_model.py``."""
    model = config.model
    flags = flag("model", model.path) + flag("revision", model.revision)
    return flags + (flag("seed", model.seed) if model.path == "embedded" else [])


def sample_flags(config: Config) -> Flags:
    """Flags that say how a record becomes a sample."""
    return flag("max_length", config.model.max_length) + flag(
        "image_max_pixels", config.model.image_max_pixels
    )


def split_flags(config: Config) -> Flags:
    """Flags of the split."""
    split = config.split
    return [
        *flag("split_mode", split.mode),
        *flag("val_size", split.val_size),
        *flag("split_seed", split.split_seed),
        *flag("val_start", split.val_start),
        *flag("train_size", split.train_size),
    ]


def validation_flags(config: Config) -> Flags:
    """Tracked flags of ``validate_tmdb.py``."""
    data = config.data
    return [
        *sample_flags(config),
        *flag("on_bad_record", data.on_bad_record),
        *(flag("max_bad_fraction", data.max_bad_fraction) if data.on_bad_record == "drop" else []),
    ]


def trust_flags(config: Config) -> Flags:
    """``--trust-remote-code`` where it is on."""
    return ["--trust-remote-code"] if config.model.trust_remote_code else []


def base_model_flags(config: Config) -> Flags:
    """How the base model is loaded. Not tracked: ``model.json`` holds the revision, and all of it depends on
    that.
    """
    return flag("revision", config.model.revision) + trust_flags(config)


def arm_flags(arm: ArmBase) -> Flags:
    """Tracked flags of one arm."""
    flags = flag("loader", arm.loader)  # type: ignore[attr-defined]
    for name in ("token_budget", "buffer_size", "fixed_batch_size", "join"):
        if hasattr(arm, name):
            flags += flag(name, getattr(arm, name))
    for name, option in (("no_warmup", "--no-warmup-buffer"), ("group_order_flip", "--group-order-flip")):
        if getattr(arm, name, False):
            flags.append(option)
    if getattr(arm, "max_patches", 0):
        flags += flag("max_patches", arm.max_patches)  # type: ignore[attr-defined]
    return flags + flag("padding", arm.padding)


def training_flags(config: Config, name: str, seed: int) -> Flags:
    """Tracked flags of ``train_accelerate.py`` for one arm and seed."""
    training = config.training
    shared = (
        "loss_scaling",
        "epochs",
        "max_steps",
        "lr",
        "lr_scheduler",
        "warmup_ratio",
        "schedule_basis",
        "max_grad_norm",
        "weight_decay",
        "gradient_accumulation_steps",
        "precision",
        "gradient_checkpointing",
        "freeze_vision_tower",
        "freeze_multimodal_projector",
        "freeze_language_model",
        "trainable_keywords",
    )
    flags = flag("arm", name) + arm_flags(config.arms[name])
    flags += split_flags(config) + sample_flags(config)
    for key in shared:
        flags += flag(key, getattr(training, key))
    if training.optimizer_states != "float32":
        flags += flag("optimizer_states", training.optimizer_states)
    return [*flags, *flag("seed", seed), *flag("attn_implementation", config.model.attn_implementation)]


def training_runtime_flags(config: Config, name: str, checkout: Path) -> Flags:
    """Flags of ``train_accelerate.py`` that change nothing about the result."""
    training, arm = config.training, config.arms[name]
    prefetch = arm.prefetch_factor or (512 if arm.loader == "odb" else 2)  # type: ignore[attr-defined]
    flags = [
        *flag("num_workers", training.num_workers),
        *flag("prefetch_factor", prefetch),
        *flag("checkpoint_every_samples", training.checkpoint_every_samples),
        *flag("checkpoint_every_minutes", training.checkpoint_every_minutes),
        *flag("log_with", training.log_with),
        *performance_flags(config),
        *base_model_flags(config),
        *flag("source_data", config.data.source_dir),
        *flag("local_data", config.data.local_dir),
    ]
    if training.deepspeed_config:
        flags += ["--deepspeed-config", str(find_file(training.deepspeed_config, checkout))]
    return flags


def performance_flags(config: Config) -> Flags:
    """Speed switches; never tracked, since they must not change a result beyond rounding."""
    value = config.performance
    return ["--performance", value if isinstance(value, str) else json.dumps(value, sort_keys=True)]


def world(config: Config) -> str:
    """Processes and machines of a training: part of its identity."""
    return f"{config.training.num_machines}x{config.training.num_processes}"


def held_out_flags(config: Config) -> Flags:
    """Flags of the split that decide its validation part."""
    flags = split_flags(config)
    at = flags.index("--train-size")
    return flags[:at] + flags[at + 2 :]


def valloss_flags(config: Config) -> Flags:
    """Tracked flags of ``eval_valloss.py``."""
    return [
        *held_out_flags(config),
        *sample_flags(config),
        *flag("max_samples", config.evaluation.max_samples),
        *flag("precision", config.evaluation.valloss.precision or config.training.precision),
    ]


def mmmu_flags(config: Config) -> Flags:
    """Tracked flags of ``eval_benchmark.py``."""
    mmmu = config.evaluation.mmmu
    return [
        *flag("split", mmmu.split),
        *flag("subjects", mmmu.subjects),
        *flag("protocol", mmmu.protocol),
        *flag("max_samples", config.evaluation.max_samples),
        *flag("image_max_pixels", config.model.image_max_pixels),
        *flag("precision", mmmu.precision or config.training.precision),
        *([] if mmmu.dataset == "embedded" else flag("dataset", mmmu.dataset)),
    ]


def evaluation_runtime_flags(config: Config, token_budget: int) -> Flags:
    """Flags of both evaluations that change nothing about the result."""
    return [
        *flag("token_budget", token_budget),
        *performance_flags(config),
        *flag("attn_implementation", config.model.attn_implementation),
        *trust_flags(config),
    ]


def compare_flags(config: Config) -> Flags:
    """Tracked flags of ``compare.py``."""
    reference = config.report.reference_arm
    if reference is None:
        reference = "standard" if "standard" in config.arms else next(iter(config.arms))
    return ["--reference-arm", reference, *flag("level", config.report.level)]
