"""What all configuration blocks share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Block(BaseModel):
    """A block of the configuration: unknown keys are errors, infinities and NaN too."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True, frozen=True)


def _no_boolean(value: Any) -> Any:
    # YAML's `yes` and `on` are booleans, and Python takes True for 1.
    if isinstance(value, bool):
        raise ValueError("a number is expected, not a boolean")
    return value


def _as_list(value: Any) -> Any:
    """Environment variables give ``a,b``; YAML gives a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [] if value is None else value


def _no_empty(value: Any) -> Any:
    """An empty string, which an unset shell variable leaves, means none."""
    return None if isinstance(value, str) and not value.strip() else value


Count = Annotated[int, BeforeValidator(_no_boolean), Field(ge=0)]
"""An integer from 0."""
Positive = Annotated[int, BeforeValidator(_no_boolean), Field(ge=1)]
"""An integer from 1."""
Number = Annotated[float, BeforeValidator(_no_boolean)]
"""A finite number."""
Fraction = Annotated[float, BeforeValidator(_no_boolean), Field(ge=0, le=1)]
"""A number from 0 to 1."""
TextList = Annotated[list[str], BeforeValidator(_as_list)]
"""A list of strings, or one string with commas."""
OptionalText = Annotated[str | None, BeforeValidator(_no_empty)]
"""A string or null."""


def _no_braces(value: Any) -> Any:
    if isinstance(value, str) and ("{" in value or "}" in value):
        raise ValueError("braces are wildcards of Snakemake and cannot stand in this path")
    return value


Text = Annotated[str, Field(min_length=1)]
"""A string that is not empty."""
Folder = Annotated[str, Field(min_length=1), BeforeValidator(_no_braces)]
"""A path below which rules write."""
OptionalFolder = Annotated[str | None, BeforeValidator(_no_braces), BeforeValidator(_no_empty)]
"""A path below which rules write, or null."""
