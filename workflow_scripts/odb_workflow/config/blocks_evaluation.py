"""Configuration blocks of evaluation, comparison and resources."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..evaluation.mmmu_subjects import SUBJECTS, select_subjects
from ..runtime.errors import UserError
from .base import Block, Count, OptionalText, Positive, Text, TextList, _no_boolean


class ValLoss(Block):
    """Validation loss."""

    token_budget: Positive = Field(
        default=16384, description="Tokens per batch; changes speed and memory, never the result."
    )
    precision: Literal["bf16", "fp16", "fp32"] | None = Field(
        default=None, description="Number format; null: that of training."
    )


class Mmmu(Block):
    """MMMU-MC."""

    dataset: Text = Field(
        default="MMMU/MMMU",
        description="`embedded` (made here), a Hub id, or a local folder of parquet files per subject.",
    )
    split: Text = Field(default="validation", description="Split of the data set.")
    subjects: TextList = Field(default=[], description="Subjects to evaluate; empty: all.")
    protocol: Literal["v1", "inline"] = Field(
        default="v1",
        description="`v1`: MMMU-MC-choice-likelihood-v1, images first; `inline`: images where the text "
        "names them.",
    )
    precision: Literal["bf16", "fp16", "fp32"] | None = Field(
        default=None, description="Number format; null: that of training."
    )
    batch_token_budget: Positive = Field(
        default=16384, description="Tokens per batch; changes speed and memory, never the result."
    )
    rows: Positive = Field(default=300, description="`embedded`: questions in all.")

    @model_validator(mode="after")
    def _subjects_of_mmmu(self) -> Mmmu:
        """MMMU's subjects are known before anything is computed; those of another data set are not."""
        if self.dataset in ("embedded", "MMMU/MMMU") and self.subjects not in ([], ["all"]):
            try:
                select_subjects(self.subjects, SUBJECTS, where="subjects")
            except UserError as error:
                raise ValueError(f"{error.what}; choose from: {', '.join(SUBJECTS)}") from None
        return self


class Evaluation(Block):
    """Both evaluations, and the checkpoint of another training to evaluate."""

    untrained_baseline: bool = Field(
        default=True, description="Evaluate the base model too, as a row of its own."
    )
    max_samples: Count = Field(default=0, description="Samples of each evaluation at most; 0: all.")
    num_processes: Positive = Field(
        default=1, description="Processes of an evaluation; never changes the result."
    )
    checkpoint: OptionalText = Field(
        default=None,
        description="Folder or Hub id that `eval_valloss` and `benchmark` evaluate; null: the ODB arm's.",
    )
    output_root: OptionalText = Field(
        default=None,
        description="Where results of `checkpoint` go; null: into its folder where that can be written.",
    )
    valloss: ValLoss = Field(default=ValLoss(), description="Validation loss.")
    mmmu: Mmmu = Field(default=Mmmu(), description="MMMU-MC.")


class Report(Block):
    """The comparison."""

    reference_arm: OptionalText = Field(
        default=None, description="Arm that the others are compared with; null: `standard`, else the first."
    )
    level: Annotated[float, Field(ge=0.5, lt=1)] = Field(
        default=0.95, description="Coverage of the intervals."
    )


class StageResources(Block):
    """What one job of a stage asks of the machine."""

    threads: Positive = Field(default=2, description="CPU cores.")
    mem_mb: Positive = Field(default=8000, description="Memory in MB.")
    runtime: Positive = Field(default=240, description="Time limit in minutes (clusters).")
    gpu: Annotated[Count | Literal["auto"], BeforeValidator(_no_boolean)] = Field(
        default="auto", description="GPUs; `auto`: one per process where `device` is cuda, else 0."
    )


class Resources(Block):
    """Resources of the stages; they never change what reruns."""

    data: StageResources = Field(
        default=StageResources(gpu=0), description="Build, validation and report of the data."
    )
    train: StageResources = Field(default=StageResources(), description="Training.")
    evaluate: StageResources = Field(default=StageResources(), description="Each evaluation.")
    compare: StageResources = Field(
        default=StageResources(threads=1, mem_mb=4000, runtime=30, gpu=0), description="The comparison."
    )
