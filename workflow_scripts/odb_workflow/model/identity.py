"""What a base model is: checked without loading its weights, and named by the content of its files."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import Any

from ..runtime.errors import UserError
from ..runtime.files import read_ends, read_json, sha256_file

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def local_model_identity(folder: Path) -> dict[str, Any]:
    """Check a Hugging Face directory and return what identifies it.

    Raises:
        UserError: the folder is missing (the nearest existing name is shown), has no config, weights or
            processor, or is no image-text-to-text model; all faults are listed together.
    """
    if not folder.is_dir():
        raise _missing(folder)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(
            "not a model: config.json is missing", where=str(folder), fix="set model.path to a HF folder"
        )
    config = read_json(config_file)
    weights = sorted({path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)})
    faults = []
    faults += _weight_faults(folder, weights)
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        faults.append("no image processor (preprocessor_config.json)")
    if not takes_images(config):
        faults.append(f"model type {config.get('model_type')!r} is no image-text-to-text model")
    if faults:
        raise UserError(
            "not a usable vision-language model: " + "; ".join(faults),
            where=str(folder),
            fix="set model.path (ODB_MM_MIX_MODEL) to an image-text-to-text model with its processor",
        )
    small = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in {".json", ".jinja", ".txt", ".model"} and path.is_file()
    )
    return {
        "model_type": config.get("model_type"),
        "config_sha256": sha256_file(config_file),
        "files": [{"path": path.name, "sha256": sha256_file(path)} for path in small],
        "weights": [
            {
                "path": path.name,
                "bytes": path.stat().st_size,
                "ends_sha256": hashlib.sha256(read_ends(path)).hexdigest(),
            }
            for path in weights
        ],
    }


def hub_model_identity(name: str, revision: str | None) -> dict[str, Any]:
    """Check a model of the Hub by its config alone and return what identifies it.

    Offline (``HF_HUB_OFFLINE=1``) only the local cache is read.

    Raises:
        UserError: it cannot be reached or is no image-text-to-text model.
    """
    from huggingface_hub import hf_hub_download

    try:
        config_file = Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # the library's errors have no common base; all end in the same message
        raise UserError(
            f"the model cannot be fetched from the Hub: {type(error).__name__}: {str(error).splitlines()[0]}",
            where=f"model.path {name!r}" + (f", revision {revision!r}" if revision else ""),
            fix="check the name and the network (HF_HUB_OFFLINE must not be set), or give a local folder",
        ) from error
    config = read_json(config_file)
    if not takes_images(config):
        raise UserError(
            f"model type {config.get('model_type')!r} is no image-text-to-text model",
            where=f"model.path {name!r}",
            fix="choose an image-text-to-text model",
        )
    # the cache's snapshot folder is named by the commit
    commit = config_file.parent.name
    return {
        "model_type": config.get("model_type"),
        "config_sha256": sha256_file(config_file),
        "commit": commit,
    }


def takes_images(config: dict[str, Any]) -> bool:
    """Whether transformers has an image-text-to-text model for this config, or its own code may have one.

    A model with its own code (``auto_map``) is taken at its word; loading it needs ``--trust-remote-code``.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if config.get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return True
    return "auto_map" in config and bool(config.get("vision_config"))


def check_remote_code(config_file: Path, trusted: bool, where: str) -> None:
    """Stop before a model that only loads with its own code, unless that is allowed.

    Raises:
        UserError: transformers does not know the model type and ``trusted`` is off.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = read_json(config_file)
    if config.get("model_type") not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not trusted:
        raise UserError(
            f"model type {config.get('model_type')!r} needs code that comes with the checkpoint",
            where=where,
            fix="read that code; if you trust it, set model.trust_remote_code: true (--trust-remote-code)",
        )


def looks_like_hub_id(name: str) -> bool:
    """``owner/name`` that is no path."""
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~", "/"))


def _weight_faults(folder: Path, weights: list[Path]) -> list[str]:
    """What is wrong with the weight files: none, shards of the index missing, or Git LFS pointers."""
    faults = []
    if not weights:
        faults.append("no weights (*.safetensors)")
    for index in sorted(folder.glob("*.index.json")):
        named = set((read_json(index).get("weight_map") or {}).values())
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            faults.append(f"{index.name} names weight files that are missing: {', '.join(missing)}")
    for path in weights:
        with open(path, "rb") as handle:
            if handle.read(40).startswith(b"version https://git-lfs"):
                faults.append(f"{path.name} is a Git LFS pointer, not weights (run: git lfs pull)")
    return faults


def _missing(folder: Path) -> UserError:
    parent = folder.parent
    names = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    nearest = difflib.get_close_matches(folder.name, names, n=1)
    hint = f"; did you mean {parent / nearest[0]}?" if nearest else ""
    return UserError(
        f"the model folder does not exist{hint}",
        where=str(folder),
        fix="set model.path (ODB_MM_MIX_MODEL) to a model folder or a Hub id",
    )
