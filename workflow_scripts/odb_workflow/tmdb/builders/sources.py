"""The YAML file that lists the sources of ``builder.kind: hub`` and ``json``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, field_validator

from ...config.base import Block, Count, OptionalText, Positive, Text
from ...runtime.errors import UserError, combine_errors


class Columns(Block):
    """Which columns of a row hold what; a column left out is looked for under its usual names."""

    conversation: OptionalText = Field(
        default=None, description="List of turns: conversations, messages or texts."
    )
    images: OptionalText = Field(default=None, description="One image or a list: image or images.")
    id: OptionalText = Field(default=None, description="The row's own id; kept under `upstream`.")
    question: OptionalText = Field(default=None, description="One question a row, with `answer`.")
    answer: OptionalText = Field(default=None, description="Its answer: text, or a list whose first counts.")
    choices: OptionalText = Field(
        default=None, description="Options of the question: lettered, and `answer` is an index or an option."
    )


class Source(Block):
    """What every source has."""

    name: Text = Field(description="Source name in the TMDB.")
    limit: Count = Field(default=0, description="Records to take; 0: all.")
    columns: Columns = Columns()
    prompt: OptionalText = Field(
        default=None, description="Question for rows that have only an answer (captions, text lines)."
    )

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not value.replace("_", "").replace("-", "").isalnum():
            raise ValueError("letters, digits, _ and - only: it becomes a folder name")
        return value


class HubSource(Source):
    """A data set on the Hub or on disk."""

    path: Text = Field(description="Hub id, or a local folder or parquet, arrow, JSON file.")
    subset: OptionalText = Field(default=None, description="Subset (configuration) of the data set.")
    split: Text = Field(default="train", description="Split of the data set.")
    revision: OptionalText = Field(default=None, description="Commit or tag of a Hub data set.")
    shuffle_seed: Count | None = Field(
        default=None, description="Shuffle before `limit` is taken (buffer of 1,000 rows); null: file order."
    )


class JsonSource(Source):
    """A JSON or JSONL file in LLaVA or ShareGPT form."""

    path: Text = Field(description="JSON file (a list of records) or JSONL file.")
    images: OptionalText = Field(
        default=None, description="Folder that the image paths start from; null: that of the file."
    )
    place_images: Literal["copy", "hardlink"] = Field(
        default="copy", description="`hardlink` saves disk; then never edit the original images in place."
    )


class HubSources(Block):
    """The file for `builder.kind: hub`."""

    sources: list[HubSource] = Field(min_length=1)
    attempts: Positive = Field(default=5, description="Attempts after a network fault, in all.")


class JsonSources(Block):
    """The file for `builder.kind: json`."""

    sources: list[JsonSource] = Field(min_length=1)


T = TypeVar("T", HubSources, JsonSources)


def load_sources(path: Path, kind: type[T]) -> T:
    """Read and check the list of sources.

    Raises:
        UserError: the file is missing or not YAML, or holds unknown keys, wrong values or one name twice;
            each fault names its key.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            "the list of sources does not exist",
            where=str(path),
            fix="set builder.sources; see config/sources-example.yaml",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"not a YAML file: {error}", where=str(path)) from error
    try:
        made = kind.model_validate(value if isinstance(value, dict) else {"sources": value})
    except ValidationError as error:
        faults = [
            UserError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") for fault in error.errors()
        ]
        raise combine_errors(faults, f"the list of sources {path} is wrong") from None
    names = [source.name for source in made.sources]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UserError(
            f"source names stand twice: {', '.join(doubled)}", where=str(path), fix="give each its own name"
        )
    return made
