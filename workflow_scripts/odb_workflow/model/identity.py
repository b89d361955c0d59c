"""What a base model is: checked without loading its weights, and named by the content of its files."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import Any

from ..runtime.errors import UserError
from ..runtime.files import read_json, sha256_file

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Small files are hashed whole; of weights the size and both ends, so that 100 GB take no minutes.
_SAMPLED_BYTES = 1 << 22


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
    if not weights:
        faults.append("no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        faults.append("no image processor (preprocessor_config.json)")
    if not takes_images(config):
        faults.append(f"model type {config.get('model_type')!r} takes no images")
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
            {"path": path.name, "bytes": path.stat().st_size, "ends_sha256": _ends_sha256(path)}
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
            f"model type {config.get('model_type')!r} takes no images",
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
    """Whether a model's config describes a vision tower beside a language model."""
    return bool(config.get("vision_config")) or any(
        "ForConditionalGeneration" in name and "VL" in name for name in config.get("architectures") or []
    )


def looks_like_hub_id(name: str) -> bool:
    """``owner/name`` that is no path."""
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~", "/"))


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


def _ends_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        digest.update(handle.read(_SAMPLED_BYTES))
        if path.stat().st_size > 2 * _SAMPLED_BYTES:
            handle.seek(-_SAMPLED_BYTES, 2)
        digest.update(handle.read(_SAMPLED_BYTES))
    return digest.hexdigest()
