"""Read, merge and check the configuration; every fault of it is told in one pass.

Precedence, highest first: ``--config``, environment variables, preset (``--configfile``, or the real preset
where
``ODB_MM_MIX_MODEL`` is set), ``config.yaml``.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ..runtime.errors import UserError, combine_errors
from .blocks_training import ARM_KINDS
from .environment import MODEL_VARIABLE, VARIABLE_OF_KEY, environment_settings, nested
from .schema import Config

REAL_PRESET = Path("config/qwen3vl-2b.yaml")
BASE = Path("config.yaml")
WHOLE_KEYS = ("builder.sizes", "performance")
"""Mappings that a higher layer replaces instead of merging into."""


class _Loader(yaml.SafeLoader):
    """YAML with duplicate keys as errors, ``1e-5`` as a number, dates as text, and only true and false as
    booleans."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a word, not a list or mapping", key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in pairs
        if tag not in {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "timestamp")}
    ]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"
    ),
    list("-+0123456789."),
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a configuration file.

    Raises:
        UserError: missing, not YAML, a key twice, or no mapping; names file and line.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        json.dumps(content, default=str)  # an anchor that holds itself cannot be walked
    except OSError as error:
        raise UserError(f"cannot read the configuration file: {error.strerror}", where=str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise UserError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=place) from None
    except (RecursionError, ValueError):
        raise UserError("nested too deeply, or an anchor holds itself", where=str(path)) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError("a configuration file holds `key: value` lines", where=str(path))
    return content


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like ``name``, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


@dataclass
class Layers:
    """Settings of several layers, merged, with the layer that each value came from."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, settings: Mapping[str, Any], source: str) -> None:
        """Lay ``settings`` over what is here."""
        self._merge(self.values, settings, source, "")

    def _merge(self, target: dict[str, Any], settings: Mapping[str, Any], source: str, prefix: str) -> None:
        for name, value in settings.items():
            key = f"{prefix}{name}"
            here = target.get(name)
            mapping = isinstance(value, Mapping) and key not in WHOLE_KEYS
            if mapping and isinstance(here, dict) and not _other_loader(key, here, value):
                self._merge(here, value, source, f"{key}.")
                continue
            target[name] = copy.deepcopy(dict(value)) if isinstance(value, Mapping) else value
            self._mark(key, value, source)

    def _mark(self, key: str, value: Any, source: str) -> None:
        for known in [known for known in self.sources if known.startswith(f"{key}.")]:
            del self.sources[known]
        if isinstance(value, Mapping) and value and key not in WHOLE_KEYS:
            for name, item in value.items():
                self._mark(f"{key}.{name}", item, source)
        else:
            self.sources[key] = source


def _other_loader(key: str, here: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    # An arm that becomes another loader kind keeps none of its old settings.
    return key.startswith("arms.") and "loader" in value and value["loader"] != here.get("loader")


@dataclass(frozen=True)
class Loaded:
    """A checked configuration and where its values come from."""

    config: Config
    sources: Mapping[str, str]
    presets: tuple[str, ...]

    def source(self, key: str) -> str:
        """The layer that set ``key``: a file, a variable, ``--config``, or ``default``."""
        return self.sources.get(key, "default")


def load_config(
    checkout: str | Path,
    *,
    environment: Mapping[str, str],
    configfiles: Sequence[str | Path] = (),
    command_line: Mapping[str, Any] | None = None,
    recorded: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> Loaded:
    """Merge all layers and check the result.

    Args:
        checkout: Folder that holds ``config.yaml`` and ``config/``.
        environment: Environment variables.
        configfiles: Presets, later ones win.
        command_line: Settings given with ``--config``.
        recorded: Of an earlier run (``--recorded``): its merged configuration, which stands in for the
        presets, and
            the settings of its training, which win over all others.

    Raises:
        UserError: lists every fault with key, value, and the nearest valid key.
    """
    checkout = Path(checkout)
    layers = Layers()
    layers.add(read_yaml(checkout / BASE), "config.yaml")
    variables = environment_settings(environment)
    presets = [str(path) for path in configfiles]
    if environment.get(MODEL_VARIABLE, "").strip():
        presets.insert(0, str(checkout / REAL_PRESET))
    if recorded:
        presets = []
        layers.add(recorded[0], "recorded")
    for path in presets:
        layers.add(read_yaml(path), _short(path, checkout))
    for key, value in variables.items():
        name = VARIABLE_OF_KEY.get(key, "environment")
        parts = key.split(".")
        if parts[0] == "arms" and not (layers.values.get("arms") or {}).get(parts[1]):
            raise UserError(
                f"{name} sets `{key}`, but the configuration has no arm `{parts[1]}`", where="arms"
            )
        layers.add(nested(key, value), f"${name}")
    if command_line:
        layers.add(command_line, "--config")
    if recorded:
        layers.add(recorded[1], "recorded")
    return Loaded(
        check(layers.values, layers.sources),
        dict(layers.sources),
        tuple(_short(p, checkout) for p in presets),
    )


def _short(path: str, checkout: Path) -> str:
    try:
        return str(Path(path).resolve().relative_to(checkout.resolve()))
    except ValueError:
        return path


def check(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> Config:
    """Check merged settings.

    Raises:
        UserError: lists every fault.
    """
    sources = sources or {}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_fault(item, sources) for item in error.errors()]
        raise combine_errors(
            list(dict.fromkeys(lines)), f"the configuration has {len(lines)} fault(s)"
        ) from None


def _fault(item: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    location = [str(part) for part in item["loc"]]
    # Inside the union of arm kinds the location holds the loader kind once more: arms, NAME, KIND, key.
    if len(location) > 2 and location[0] == "arms" and location[2] in ARM_KINDS:
        kind = location.pop(2)
    else:
        kind = None
    # Alternatives of a value (`integer` or `auto`) append their own name.
    location = [
        part
        for part in location
        if not re.search(r"[\[\]()]|^(int|str|float|constrained-|literal|function)", part)
    ]
    key = ".".join(location)
    value = item.get("input")
    if item["type"] == "extra_forbidden":
        hint = _key_hint(location, kind)
        return f"unknown key `{key}` (value {value!r}{_from(key, sources)})" + (
            f"; did you mean `{hint}`?" if hint else ""
        )
    if item["type"] == "missing":
        return f"missing key `{key}`; add it to config.yaml or to the preset"
    message = item["msg"].removeprefix("Value error, ")
    if not key:
        return message
    if isinstance(value, str):
        value = re.sub(r"(?<=://)[^/@\s]+@", "...@", value)  # never a password in a message
    shown = f" = {value!r}" if not isinstance(value, (dict, BaseModel)) else ""
    return f"`{key}`{shown}{_from(key, sources)}: {message[:1].lower()}{message[1:]}"


def _from(key: str, sources: Mapping[str, str]) -> str:
    inside = (name for leaf, name in sources.items() if leaf.startswith(f"{key}."))
    source = sources.get(key) or next(inside, None)
    return f", from {source}" if source else ""


def _key_hint(location: Sequence[str], kind: str | None) -> str | None:
    *parents, name = location
    if kind:
        known = list(ARM_KINDS[kind].model_fields)
    else:
        known = [key.rsplit(".", 1)[-1] for key in all_keys() if key.split(".")[:-1] == list(parents)]
    if near := nearest(name, known):
        return ".".join([*parents, near])
    elsewhere = {key.rsplit(".", 1)[-1]: key for key in reversed(all_keys())}
    near = nearest(name, elsewhere)
    return elsewhere[near] if near else None


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """All keys of the schema in dotted form; arms by their kind's keys under ``arms.NAME``."""
    keys = []
    for name, info in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += all_keys(info.annotation, f"{prefix}{name}.")
    if model is Config:
        seen = {key: None for kind in ARM_KINDS.values() for key in kind.model_fields}
        keys += [f"arms.NAME.{key}" for key in seen]
    return keys


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys; mappings that count as one value stay whole."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in WHOLE_KEYS:
            flat.update(flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat
