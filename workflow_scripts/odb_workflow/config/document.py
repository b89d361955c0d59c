"""Make config/config.schema.yaml and config/README.md from the Pydantic models.

PYTHONPATH=workflow_scripts python -m odb_workflow.config.document
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from .blocks_training import ARM_KINDS
from .environment import PADDING_VARIABLES, VARIABLES
from .load import BASE, REAL_PRESET, read_yaml
from .schema import Config

CHECKOUT = Path(__file__).resolve().parents[3]
SCHEMA_FILE = Path("config/config.schema.yaml")
README_FILE = Path("config/README.md")

INTRODUCTION = """\
# Configuration

This file is made from the models in `workflow_scripts/odb_workflow/config/`; a test holds the two equal.

Settings come from four places, the later one wins:

1. `config.yaml`, the embedded default;
2. a preset, given as `--configfile config/NAME.yaml`, or `config/qwen3vl-2b.yaml` by itself when
   `ODB_MM_MIX_MODEL` is set;
3. environment variables;
4. `--config 'training={lr: 2e-5}'` (nested keys as YAML in braces).

`./run.sh COMMAND` and plain `snakemake TARGET` read the same four. An unknown key, a wrong value, a key that
stands twice and an unknown `ODB_MM_MIX_` or `ODB_ACCEL_EVAL_` variable are errors; all are listed at once. An
empty variable counts as unset.

| preset | what it is |
|---|---|
| `config.yaml` | a tiny Qwen3-VL on embedded data, CPU, minutes |
| `config/qwen3vl-2b.yaml` | Qwen3-VL-2B-Instruct on the public MM-Mix data, the published settings |
| `config/batching-study.yaml` | five arms on the embedded data: fixed, grouped, packed, offline oracle, ODB |

An arm is three lines: `odb_24k: {loader: odb, token_budget: 24576}`. A preset takes an arm of `config.yaml`
away with `name: null`. The names of the targets follow: `train_odb_24k`, `eval_odb_24k`, `all_odb_24k`.

What reruns after a change: each key says it in the column "reruns". *nothing*: the key says how a result is
computed, not what it is.
"""

RERUNS = (
    ("run", "another run, with folders of its own"),
    ("device", "nothing"),
    ("output_root", "another folder"),
    ("results_root", "another folder"),
    ("log_root", "nothing"),
    ("builder.checkout", "nothing"),
    ("builder.", "build; everything if the TMDB differs"),
    ("data.on_bad_record", "validation of the data, everything after"),
    ("data.max_bad_fraction", "validation of the data, everything after"),
    ("data.dir", "everything if the TMDB differs"),
    ("data.", "nothing"),
    ("model.trust_remote_code", "nothing"),
    ("model.attn_implementation", "trainings and after"),
    ("model.", "everything after the build"),
    ("split.train_size", "trainings and after, data report"),
    ("split.", "trainings, evaluations, comparison, data report"),
    ("training.master_port", "nothing"),
    ("training.num_workers", "nothing"),
    ("training.log_with", "nothing"),
    ("training.checkpoint_every", "nothing"),
    ("training.save_final_model", "nothing when switched off; trainings when switched on"),
    ("training.", "trainings and after"),
    ("arms.NAME.prefetch_factor", "nothing"),
    ("arms.", "that arm, comparison"),
    ("seeds", "trainings of new seeds, comparison"),
    ("performance", "nothing"),
    ("evaluation.untrained_baseline", "evaluation of the untrained model, comparison"),
    ("evaluation.max_samples", "both evaluations, comparison"),
    ("evaluation.valloss.precision", "validation loss, comparison"),
    ("evaluation.mmmu.batch_token_budget", "nothing"),
    ("evaluation.mmmu.", "MMMU-MC, comparison"),
    ("evaluation.", "nothing"),
    ("report.", "comparison"),
    ("resources.", "nothing"),
)


def schema_text() -> str:
    """The JSON schema of the configuration, as YAML."""
    schema = Config.model_json_schema()
    # Files hold parts of the configuration, and take arms away with null.
    arm = schema["properties"]["arms"]["additionalProperties"]
    schema["properties"]["arms"]["additionalProperties"] = {"anyOf": [arm, {"type": "null"}]}
    for part in [schema, *schema["$defs"].values()]:
        if part.get("required") != ["loader"]:
            part.pop("required", None)
    head = "# Made by odb_workflow.config.document; editors check configuration files with it.\n"
    return head + yaml.safe_dump(schema, sort_keys=False, allow_unicode=True, width=110)


def readme_text() -> str:
    """config/README.md."""
    base, real = read_yaml(CHECKOUT / BASE), read_yaml(CHECKOUT / REAL_PRESET)
    lines = [INTRODUCTION]
    top = {name: info for name, info in Config.model_fields.items() if not _block(info.annotation)}
    lines += ["## Top level\n", *_table("", top, base, real)]
    for name, info in Config.model_fields.items():
        if name == "arms":
            lines += [f"\n## arms\n\n{info.description}\n"]
            for kind, model in ARM_KINDS.items():
                lines += [f"\n### loader: {kind}\n\n{_first_line(model)}\n"]
                lines += _table("arms.NAME.", model.model_fields, base, real, arm=kind)
        elif block := _block(info.annotation):
            lines += [f"\n## {name}\n\n{_first_line(block)}\n", *_rows_of(f"{name}.", block, base, real)]
    lines += ["\n## Environment variables\n", "| variable | key |", "|---|---|"]
    lines += [f"| `{variable}` | `{key}` |" for variable, key in VARIABLES.items()]
    for variable, keys in PADDING_VARIABLES.items():
        lines.append(f"| `{variable}` | {', '.join(f'`{key}`' for key in keys)} |")
    lines += [
        "\n`HF_HUB_OFFLINE`, `HF_DATASETS_OFFLINE` and `TRANSFORMERS_OFFLINE` work as in their libraries. "
        "`HF_TOKEN` is used by them\nand never written. `PYTHON` names the interpreter of `run.sh`.",
    ]
    return "\n".join(lines) + "\n"


def _block(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _rows_of(prefix: str, model: type[BaseModel], base: Any, real: Any) -> list[str]:
    fields = model.model_fields
    plain = {name: info for name, info in fields.items() if not _block(info.annotation)}
    lines = _table(prefix, plain, base, real) if plain else []
    for name, info in fields.items():
        if block := _block(info.annotation):
            lines += [f"\n### {prefix}{name}\n\n{info.description}\n"]
            lines += _rows_of(f"{prefix}{name}.", block, base, real)
    return lines


def _table(prefix: str, fields: Mapping[str, Any], base: Any, real: Any, arm: str | None = None) -> list[str]:
    lines = [
        "| key | values | `config.yaml` | real preset | variable | reruns | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, info in fields.items():
        if name == "arms":
            continue
        key = f"{prefix}{name}"
        looked_up = key.replace("NAME", arm) if arm else key
        here = _look_up(base, looked_up, info)
        there = _look_up(real, looked_up, None)
        cells = [
            f"`{name}`",
            _type_text(info.annotation),
            _value_text(here),
            "" if there is ... or there == here else _value_text(there),
            ", ".join(f"`{variable}`" for variable, known in VARIABLES.items() if known == looked_up),
            next(text for start, text in RERUNS if key.startswith(start)),
            info.description or "",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _look_up(values: Any, key: str, info: Any) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return info.default if info is not None and not info.is_required() else ...
        values = values[part]
    return values


def _value_text(value: Any) -> str:
    if value is ...:
        return ""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _type_text(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if annotation is None or annotation is type(None):
        return "null"
    if origin is typing.Annotated:
        return _type_text(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_text(part) for part in typing.get_args(annotation))
    if origin is list:
        return f"list of {_type_text(typing.get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}.get(
        annotation, str(annotation)
    )


def main() -> None:
    """Write both files."""
    (CHECKOUT / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")
    (CHECKOUT / README_FILE).write_text(readme_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
