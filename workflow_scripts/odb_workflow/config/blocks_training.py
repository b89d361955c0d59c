"""Configuration blocks of training: the settings that all arms share, and the arms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .base import Block, Count, Fraction, Number, OptionalText, Positive, TextList


def _deepspeed(value: Any) -> Any:
    """`1`/`true` is the shipped ZeRO-2 file; `0`, `false`, `none` and nothing switch DeepSpeed off."""
    text = str(value).strip().lower()
    if value is None or text in {"", "0", "false", "no", "none", "off", "null"}:
        return None
    return "config/ds_z2.json" if text in {"1", "true", "yes", "on"} else value


class Training(Block):
    """Settings of training that every arm shares."""

    num_processes: Positive = Field(default=1, description="Training processes per machine (one per GPU).")
    num_machines: Positive = Field(
        default=1, description="Machines of one training; more than 1 needs SLURM."
    )
    master_port: Count = Field(
        default=0,
        le=65535,
        description="Port of the rendezvous; 0: a free one (on a cluster from the job id).",
    )
    epochs: Number = Field(default=1.0, gt=0, description="Passes over the training records; fractions work.")
    max_steps: Count = Field(default=0, description="Stop after this many optimizer steps; 0: no limit.")
    lr: Number = Field(default=1e-5, gt=0, description="Highest learning rate.")
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="Shape of the learning rate after warm-up."
    )
    warmup_ratio: Fraction = Field(default=0.03, description="Share of the training that warms up.")
    schedule_basis: Literal["samples", "label_tokens"] = Field(
        default="samples", description="What progress is counted in; the same for every arm."
    )
    max_grad_norm: Number = Field(default=4.0, ge=0, description="Gradient clipping; 0: off.")
    weight_decay: Number = Field(default=0.0, ge=0, description="AdamW weight decay.")
    gradient_accumulation_steps: Positive = Field(default=1, description="Micro-batches per optimizer step.")
    loss_scaling: Literal["label_tokens", "exact", "approx", "none"] = Field(
        default="label_tokens",
        description="How ranks are weighted: `label_tokens` is the true mean; the others are the package's "
        "own.",
    )
    seed: Count = Field(default=42, description="Seed of the order of samples and of everything random.")
    precision: Literal["bf16", "fp16", "fp32"] = Field(
        default="bf16", description="Number format of training."
    )
    optimizer_states: Literal["float32", "16bit"] = Field(
        default="float32",
        description="bf16 without DeepSpeed: `float32` keeps a float32 copy of the weights; `16bit` updates "
        "the weights themselves: 8 bytes per parameter less, rounded updates.",
    )
    deepspeed_config: Annotated[OptionalText, BeforeValidator(_deepspeed)] = Field(
        default=None, description="DeepSpeed JSON file; null: without DeepSpeed."
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        default="on", description="Recompute activations to save memory."
    )
    freeze_vision_tower: bool = Field(default=True, description="Do not train the vision tower.")
    freeze_multimodal_projector: bool = Field(default=True, description="Do not train the projector.")
    freeze_language_model: bool = Field(default=False, description="Do not train the language model.")
    trainable_keywords: TextList = Field(
        default=[],
        description="Train only parameters whose name holds one of these; empty: all that is not frozen.",
    )
    save_final_model: bool = Field(
        default=True, description="Save the trained model; without it nothing to evaluate."
    )
    num_workers: Positive = Field(default=4, description="Data workers per training process.")
    checkpoint_every_samples: Count = Field(
        default=0, description="Resume point every so many samples; 0: off."
    )
    checkpoint_every_minutes: Number = Field(
        default=15, ge=0, description="Resume point every so many minutes; 0: off."
    )
    log_with: OptionalText = Field(
        default=None, description="Tracker of accelerate, for example `tensorboard`."
    )


BatchSize = Positive | Literal["auto"]
"""A number of samples, or the word that lets the training find it."""


class ArmBase(Block):
    """What every arm has."""

    padding: Literal["pad", "pack"] = Field(
        default="pad", description="`pad`: right padding (the published form); `pack`: no padding at all."
    )
    prefetch_factor: Positive | None = Field(
        default=None, description="Batches that each data worker prepares ahead; null: 512 for odb, else 2."
    )


class StandardArm(ArmBase):
    """Fixed batches."""

    loader: Literal["standard"] = Field(description="Loader kind.")
    fixed_batch_size: BatchSize = Field(
        default=1,
        description="Samples per batch and rank; `auto`: the largest that fits this device's memory.",
    )


class LengthGroupedArm(ArmBase):
    """Fixed batches of similar length."""

    loader: Literal["length_grouped"] = Field(description="Loader kind.")
    fixed_batch_size: BatchSize = Field(
        default=1,
        description="Samples per batch and rank; `auto`: the largest that fits this device's memory.",
    )


class TokenBudgetArm(ArmBase):
    """Offline oracle: lengths are measured first, then batches are filled to the budget."""

    loader: Literal["token_budget"] = Field(description="Loader kind.")
    token_budget: Positive = Field(default=12288, description="Tokens per batch and rank.")


class OdbArm(ArmBase):
    """Online Dynamic Batching."""

    loader: Literal["odb"] = Field(description="Loader kind.")
    token_budget: Positive = Field(default=12288, description="Tokens per batch and rank, padding included.")
    buffer_size: Positive = Field(default=1024, description="Samples that ODB holds to group by length.")
    join: bool = Field(default=True, description="Ranks end together; no rank drops its last samples.")
    no_warmup: bool = Field(
        default=False, description="Fill the whole buffer first instead of ODB's ramp (better on small data)."
    )
    group_order_flip: bool = Field(default=False, description="ODB emits groups in reversed order of length.")
    max_patches: Count = Field(default=0, description="Image patches per batch at most; 0: no limit.")


Arm = Annotated[
    StandardArm | LengthGroupedArm | TokenBudgetArm | OdbArm,
    Field(discriminator="loader"),
]
ARM_KINDS: dict[str, type[ArmBase]] = {
    "odb": OdbArm,
    "standard": StandardArm,
    "length_grouped": LengthGroupedArm,
    "token_budget": TokenBudgetArm,
}
