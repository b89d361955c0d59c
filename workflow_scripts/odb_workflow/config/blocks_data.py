"""Configuration blocks of the data and model stages."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from .base import (
    Block,
    Count,
    Folder,
    Fraction,
    Number,
    OptionalFolder,
    OptionalText,
    Positive,
    Text,
    TextList,
)

# In https a user alone may be a token; in ssh it is only a name.
_PASSWORD = re.compile(r"^https?://[^/@\s]+@|://[^/@\s]*:[^/@\s]*@")


class Builder(Block):
    """Where the TMDB comes from."""

    kind: Literal["embedded", "git", "hub", "json", "existing"] = Field(
        description="`embedded`: the builder in `dataset_builder/`; `git`: a builder repository; `hub`: "
        "sources read "
        "with `datasets`; `json`: LLaVA/ShareGPT files; `existing`: `data.dir` is a finished TMDB, nothing "
        "is built."
    )
    repo: OptionalText = Field(
        default=None,
        description="`git`: URL (without password), local path or bundle of the builder's repository.",
    )
    ref: OptionalText = Field(
        default=None,
        description="`git`: commit, tag or branch; a commit is the only one that stays the same.",
    )
    checkout: Folder = Field(
        default=".deps/build-mm-mix-dataset", description="Folder of the builder's checkout."
    )
    args: TextList = Field(
        default=[], description="Further arguments of the builder's program, one per item."
    )
    sizes: Positive | dict[str, Count] | None = Field(
        default=None,
        description="`embedded`: records in all, or per source as a mapping; null: the builder's own.",
    )
    seed: Count = Field(default=42, description="Seed of the embedded builder.")
    sources: OptionalText = Field(
        default=None,
        description="`hub`, `json`: YAML file that lists the sources (see `config/sources-example.yaml`).",
    )

    @field_validator("repo")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        # The configuration is written beside the results, the rules' parameters into Snakemake's metadata.
        if value and _PASSWORD.search(value):
            raise ValueError(
                "a URL here must hold no password or token, because the configuration is kept with the "
                "results; let git find it (a credential helper, ~/.netrc) or use an ssh URL"
            )
        return value


class Data(Block):
    """The TMDB on disk and what happens to bad records."""

    dir: OptionalFolder = Field(
        default=None, description="Folder of the TMDB; null: `data/<run>-tmdb`, one for each run."
    )
    source_dir: OptionalText = Field(
        default=None,
        description="Copy the TMDB from here to `local_dir` before training (slow shared disks).",
    )
    local_dir: OptionalText = Field(
        default=None,
        description="Node-local folder that the TMDB is staged to, once per node; checked and reused.",
    )
    on_bad_record: Literal["error", "drop"] = Field(
        default="error",
        description="`error`: list all bad records, then stop; `drop`: leave them out and report them.",
    )
    max_bad_fraction: Fraction = Field(
        default=0.05, description="`drop`: stop when more than this share of the records is bad."
    )
    workers: Positive = Field(
        default=2, description="Processes of the validation pass; never more than the job's cores."
    )


class Model(Block):
    """The base model and how samples are made for it."""

    path: Text = Field(
        description="`embedded` (a tiny Qwen3-VL made here), a local Hugging Face folder, or a Hub id."
    )
    revision: OptionalText = Field(default=None, description="Commit or tag of a Hub model.")
    seed: Count = Field(default=42, description="Seed of the embedded model's weights.")
    trust_remote_code: bool = Field(
        default=False, description="Run model code that comes with the checkpoint."
    )
    attn_implementation: OptionalText = Field(
        default=None,
        description="Attention of transformers (`sdpa`, `eager`, ...); null: the model's default.",
    )
    max_length: Positive = Field(
        default=16384, description="Longest sample in tokens, template and images included."
    )
    image_max_pixels: Positive = Field(
        default=589824, description="Largest image in pixels; larger ones are scaled."
    )


class Split(Block):
    """Which records are for training and which for validation."""

    mode: Literal["lf_val_size", "prefix", "tail", "grouped"] = Field(
        default="lf_val_size",
        description="`lf_val_size`: the published permutation; `prefix`: training is the head of the file; "
        "`tail`: "
        "validation from `val_start`; `grouped`: as lf_val_size, but records that share an image stay "
        "together.",
    )
    val_size: Number = Field(
        default=0.05, gt=0, description="Share of the records, or their number when above 1."
    )
    split_seed: Count = Field(default=42, description="Seed of the permutation.")
    val_start: Count | None = Field(default=None, description="`tail`: first validation record.")
    train_size: Count = Field(default=128, description="Training records to use, from the head; 0: all.")
