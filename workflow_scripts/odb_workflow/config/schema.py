"""The configuration as one Pydantic model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..model.performance import PerformanceSettings
from ..runtime.errors import UserError
from .base import Block, Count, OptionalFolder
from .blocks_data import Builder, Data, Model, Split
from .blocks_evaluation import Evaluation, Report, Resources
from .blocks_training import Arm, Training

ARM_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
RUN_NAME = re.compile(r"[A-Za-z0-9_-]+\Z")
RULES = (
    "clone_dataset_builder",
    "build_tmdb",
    "prepare_model",
    "prepare_benchmark",
    "validate_tmdb",
    "data_report",
    "train",
    "valloss",
    "mmmu",
    "valloss_external",
    "mmmu_external",
    "compare",
)
TARGETS = ("all", "data", "eval_valloss", "benchmark", "comparison", "report", "prefetch", "inspect")
BASELINE = "untrained"
MAX_SEED = 2**32 - 1
"""The largest that NumPy takes."""


def arm_name_fault(name: str) -> str | None:
    """Why ``name`` cannot be an arm's name, or None.

    Targets ``train_ARM``, ``eval_ARM`` and ``all_ARM`` are made from it and must not be a rule or target
    already.
    """
    if not ARM_NAME.match(name):
        return "an arm's name is lower-case letters, digits and _, and begins with a letter"
    taken = {*RULES, *TARGETS}
    if name == BASELINE:
        return f"`{BASELINE}` is the row of the base model"
    if name == "external":
        return "`external` is the folder of evaluated checkpoints of other trainings"
    for made in (name, f"train_{name}", f"eval_{name}", f"all_{name}"):
        if made in taken:
            return f"`{made}` is a rule or target already"
    return None


def _as_seeds(value: Any) -> Any:
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    return [] if value is None else value


class Config(Block):
    """The whole configuration."""

    run: str = Field(
        description="Name of the run; it has its own folders under `outputs/`, `results/` and `logs/`."
    )
    device: Literal["cpu", "cuda"] = Field(default="cuda", description="What training and evaluation run on.")
    output_root: OptionalFolder = Field(default=None, description="Folder of the run; null: `outputs/<run>`.")
    results_root: OptionalFolder = Field(
        default=None, description="Folder of the comparison; null: `results/<run>`."
    )
    log_root: OptionalFolder = Field(default=None, description="Folder of the logs; null: `logs/<run>`.")
    builder: Builder = Field(description="Where the TMDB comes from.")
    data: Data = Field(description="The TMDB on disk.")
    model: Model = Field(description="The base model.")
    split: Split = Field(default=Split(), description="Training and validation records.")
    training: Training = Field(default=Training(), description="What all arms share.")
    arms: dict[str, Arm] = Field(min_length=1, description="The arms: name, loader kind and its settings.")
    seeds: Annotated[list[Count], BeforeValidator(_as_seeds)] = Field(
        default=[],
        description="Train every arm once per seed; several make `ARM/seed-N`, empty: `training.seed`.",
    )
    performance: Literal["auto", "reference"] | dict[str, Any] = Field(
        default="auto",
        description="Speed switches: `auto`, `reference` (the plain transformers forward), or a mapping of "
        "switches.",
    )
    evaluation: Evaluation = Field(default=Evaluation(), description="Validation loss and MMMU-MC.")
    report: Report = Field(default=Report(), description="The comparison.")
    resources: Resources = Field(default=Resources(), description="Cores, memory, time and GPUs per stage.")

    @field_validator("run")
    @classmethod
    def _run_name(cls, value: str) -> str:
        if not RUN_NAME.match(value):
            raise ValueError("letters, digits, - and _ only")
        return value

    @field_validator("arms", mode="before")
    @classmethod
    def _without_removed(cls, value: Any) -> Any:
        # A preset removes an arm of config.yaml by `arm: null`.
        return (
            {name: arm for name, arm in value.items() if arm is not None}
            if isinstance(value, dict)
            else value
        )

    @field_validator("arms")
    @classmethod
    def _arm_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        faults = [f"`{name}`: {fault}" for name in value if (fault := arm_name_fault(name))]
        if faults:
            raise ValueError("; ".join(faults))
        return value

    @field_validator("performance")
    @classmethod
    def _known_switches(cls, value: Any) -> Any:
        try:
            PerformanceSettings.parse(value)
        except UserError as error:
            raise ValueError(f"{error.what} ({error.where}); {error.fix}") from None
        return value

    @field_validator("seeds")
    @classmethod
    def _distinct_seeds(cls, value: list[int]) -> list[int]:
        if len(set(value)) != len(value):
            raise ValueError("a seed stands twice")
        return value

    @model_validator(mode="after")
    def _blocks_fit(self) -> Config:
        faults = []
        if self.builder.kind == "git" and not self.builder.repo:
            faults.append("builder.repo is needed where builder.kind is git")
        if self.builder.kind in {"hub", "json"} and not self.builder.sources:
            faults.append(f"builder.sources is needed where builder.kind is {self.builder.kind}")
        if self.split.mode == "tail" and self.split.val_start is None:
            faults.append("split.val_start is needed where split.mode is tail")
        if self.split.val_size > 1 and self.split.val_size != int(self.split.val_size):
            faults.append("split.val_size above 1 is a number of records and must be whole")
        reference = self.report.reference_arm
        rows = [*self.arms, *([BASELINE] if self.evaluation.untrained_baseline else [])]
        if reference is not None and reference not in rows:
            known = ", ".join(rows)
            faults.append(f"report.reference_arm {reference!r} is no arm of this run; arms: {known}")
        if max(self.training_seeds) > MAX_SEED:
            faults.append(f"a seed (seeds, training.seed) is above {MAX_SEED}")
        if self.device == "cpu" and self.training.precision == "fp16":
            faults.append("training.precision fp16 needs device cuda")
        training = self.training
        if training.optimizer_states == "16bit" and (
            training.precision != "bf16" or training.deepspeed_config
        ):
            faults.append("training.optimizer_states 16bit needs precision bf16 and no DeepSpeed")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def training_seeds(self) -> list[int]:
        """Seeds of the trainings: ``seeds``, or ``training.seed`` alone."""
        return list(self.seeds) or [self.training.seed]
