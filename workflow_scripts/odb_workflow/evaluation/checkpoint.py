"""What is evaluated: a model folder, the ``checkpoint.json`` of a training, or a model on the Hub."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_workflow.model.identity import PROCESSOR_FILES, WEIGHT_PATTERNS
from odb_workflow.runtime.errors import UserError
from odb_workflow.runtime.files import read_json, sha256_file

logger = logging.getLogger(__name__)

RECORD_NAME = "checkpoint.json"
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded.

    Attributes:
        given: What the user gave.
        model_dir: Folder with ``config.json`` and the weights.
        sha256: Identity of its files.
        base_model: Where the processor comes from if the folder has none; None when unknown.
        arm: Arm of the training that wrote it; None for a checkpoint from elsewhere.
        home: Folder beside which results go by default: that of ``checkpoint.json``, or the model folder.
    """

    given: str
    model_dir: Path
    sha256: str
    base_model: str | None
    arm: str | None
    home: Path

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for sending to other ranks."""
        return {
            key: str(value) if isinstance(value, Path) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Checkpoint:
        """The inverse of :meth:`to_dict`."""
        return cls(**{**values, "model_dir": Path(values["model_dir"]), "home": Path(values["home"])})


def resolve_checkpoint(given: str, *, revision: str | None = None) -> Checkpoint:
    """Find the model that ``given`` names and take the checksum of its files.

    Args:
        given: A model folder, a ``checkpoint.json`` (or a folder with one and no model), or a Hub id.
        revision: Branch, tag or commit of a Hub model.

    Raises:
        UserError: nothing is there, it is no model, its files do not match the record, or no model was saved.
    """
    path = Path(given)
    if path.is_dir() and not (path / "config.json").is_file() and (path / RECORD_NAME).is_file():
        path = path / RECORD_NAME
    if path.is_file():
        return _from_record(path, given)
    if path.is_dir():
        beside = path.parent / RECORD_NAME
        if beside.is_file():
            record = read_json(beside)
            if (
                isinstance(record, dict)
                and (beside.parent / str(record.get("model_dir"))).resolve() == path.resolve()
            ):
                return dataclasses.replace(_from_record(beside, given), home=path)
        return _from_folder(path, given)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not given.startswith((".", "/")):
        return _from_hub(given, revision)
    raise UserError(
        "the checkpoint does not exist",
        where=given,
        fix="give a model folder, a checkpoint.json or a Hub id (ODB_ACCEL_EVAL_CHECKPOINT)",
    )


def _from_record(path: Path, given: str) -> Checkpoint:
    try:
        record = read_json(path)
    except UserError:
        record = None
    if not isinstance(record, dict) or "model_dir" not in record:
        raise UserError(
            "not the checkpoint.json of a training: "
            + ("it has no model_dir" if isinstance(record, dict) else "it is not JSON"),
            where=str(path),
            fix="give a model folder, the checkpoint.json of an arm or a Hub id",
        )
    if record.get("saved") is False:
        raise UserError(
            "no model was saved by this training",
            where=str(path),
            fix="train with SAVE_FINAL_MODEL=1 (ODB_MM_MIX_SAVE_FINAL_MODEL=1), then evaluate",
        )
    named = str(record["model_dir"])
    folder = next((place for place in (path.parent / named, Path(named)) if place.is_dir()), None)
    if folder is None and not re.fullmatch(r"[\w.-]+/[\w.-]+", named):
        raise UserError(f"the model folder {named!r} is gone", where=str(path), fix="train this arm again")
    found = (
        _from_hub(named, record.get("revision"))
        if folder is None
        else _from_folder(folder, given, sha256=record.get("sha256"))
    )
    for file in record.get("files") or []:
        target = found.model_dir / file["path"]
        if not target.is_file():
            raise UserError(
                f"the checkpoint lacks {file['path']}", where=str(path), fix="train this arm again"
            )
        if file.get("bytes") is not None and target.stat().st_size != file["bytes"]:
            raise UserError(
                f"{file['path']} has {target.stat().st_size} bytes, the record says {file['bytes']}",
                where=str(path),
                fix="the files were changed after training; train this arm again",
            )
        if file.get("sha256") and sha256_file(target) != file["sha256"]:
            raise UserError(
                f"{file['path']} does not have the checksum of the record",
                where=str(path),
                fix="the files were changed after training; train this arm again",
            )
    return dataclasses.replace(
        found,
        given=given,
        base_model=record.get("base_model") or found.base_model,
        arm=record.get("arm"),
        home=path.parent,
    )


def _from_folder(folder: Path, given: str, sha256: str | None = None) -> Checkpoint:
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(
            "this is an adapter, not a whole model",
            where=str(folder),
            fix="merge it into its base model first",
        )
    if not (folder / "config.json").is_file():
        raise UserError(
            "not a checkpoint: it has no config.json",
            where=str(folder),
            fix="give the folder that save_pretrained wrote (config.json and *.safetensors)",
        )
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise UserError(
            "not a checkpoint: it has a config.json but no weights (*.safetensors)",
            where=str(folder),
            fix="check that the training ended and saved its model",
        )
    config = read_json(folder / "config.json")
    named = config.get("_name_or_path") if isinstance(config, dict) else None
    return Checkpoint(
        given=given,
        model_dir=folder,
        sha256=sha256 or folder_sha256(folder),
        base_model=named or None,
        arm=None,
        home=folder,
    )


def _from_hub(name: str, revision: str | None) -> Checkpoint:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_HUB_PATTERNS)))
    except Exception as error:  # huggingface_hub and httpx raise many unrelated classes here
        raise UserError(
            f"cannot fetch the model from the Hub: {type(error).__name__}: {error}",
            where=name,
            fix="check the id, the network, HF_HUB_OFFLINE and HF_TOKEN, or give a local model folder",
        ) from error
    return dataclasses.replace(
        _from_folder(folder, name), base_model=name, home=Path(name.replace("/", "--"))
    )


def folder_sha256(folder: Path) -> str:
    """Hex SHA-256 over names and contents of a model folder's own files (not of what evaluations wrote below
    it).
    """
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")):
        digest.update(json.dumps([file.name, file.stat().st_size, sha256_file(file)]).encode())
    return digest.hexdigest()


def processor_fallback(checkpoint: Checkpoint, base_model: str | None) -> str | None:
    """Where the processor comes from when the checkpoint has none of its own; None when it has.

    Raises:
        UserError: it has none and no base model is known.
    """
    folder = checkpoint.model_dir
    missing = [
        kind
        for kind, names in (("image processor", PROCESSOR_FILES), ("tokenizer", _TOKENIZER_FILES))
        if not any((folder / name).is_file() for name in names)
    ]
    if not missing:
        return None
    source = base_model or checkpoint.base_model
    if not source or (os.path.isdir(source) and Path(source).resolve() == folder.resolve()):
        raise UserError(
            f"the checkpoint has no {' and no '.join(missing)}, and no base model is known",
            where=str(folder),
            fix="give --base-model, the model that the training started from",
        )
    logger.warning("the checkpoint has no %s; the processor of %s is used", " and no ".join(missing), source)
    return source
