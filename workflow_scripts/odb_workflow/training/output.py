"""The folder of an arm: what a new training removes, the saved model, the record beside it."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..runtime.errors import UserError
from ..runtime.files import atomic_directory, atomic_write_json, read_ends, read_json, sha256_file
from .finished import FINISHED_NAME, RECORD_NAME

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = "checkpoint"
IDENTITY_NAME = ".arm_identity.json"
RUN_RECORD_NAME = "run_record.json"
EVALUATIONS = ("eval_out_accelerate_valloss", "mmmu_mc_likelihood_accelerate")


def check_folder(folder: Path, model: str, arm: str) -> None:
    """Refuse a folder that holds what was trained from another model.

    Raises:
        UserError: the folder's record names another model or arm; nothing is touched.
    """
    identity = folder / IDENTITY_NAME
    mine = {"model": model, "arm": arm}
    if identity.exists():
        theirs = read_json(identity)
        different = {key: value for key, value in theirs.items() if key in mine and value != mine[key]}
        if different:
            raise UserError(
                "this folder belongs to another training: "
                + ", ".join(f"{key} {value} (now {mine[key]})" for key, value in different.items()),
                where=str(folder),
                fix="give the run another name or another --output-dir, or delete the folder",
            )


def begin_training(folder: Path, model: str, arm: str) -> None:
    """Note whose folder it is and remove weights, summaries and evaluations of an earlier training.

    Call it when nothing but the training itself can go wrong any more; the record of the old weights goes
    first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / IDENTITY_NAME, {"model": model, "arm": arm})
    for path in [folder / RECORD_NAME, *folder.glob("train_summary_*.json"), folder / RUN_RECORD_NAME]:
        path.unlink(missing_ok=True)
    for name in (CHECKPOINT_NAME, FINISHED_NAME, *EVALUATIONS):
        if (folder / name).exists():
            shutil.rmtree(folder / name)


def save_model(folder: Path, model: torch.nn.Module, processor: Any) -> None:
    """Save model and processor as a Hugging Face directory ``checkpoint/``, whole or not at all.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    try:
        with atomic_directory(folder / CHECKPOINT_NAME) as part:
            model.save_pretrained(part)
            processor.save_pretrained(part)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot save the trained model: {error}",
            where=str(folder / CHECKPOINT_NAME),
            fix="free space there; the same command continues from the last resume point",
        ) from error


def write_checkpoint_record(folder: Path, arm: str, base_model: str, saved: bool) -> dict[str, Any]:
    """Write ``checkpoint.json``: the saved files with size and hash; the last file of a training."""
    root = folder / CHECKPOINT_NAME
    files = []
    if saved:
        files = [
            {"path": str(path.relative_to(root)), "bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(root.rglob("*"))
            if path.is_file()
        ]
    listing = "".join(f"{file['sha256']}  {file['path']}\n" for file in files)
    record = {
        "format": 1,
        "model_dir": CHECKPOINT_NAME,
        "files": files,
        "sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "base_model": base_model,
        "arm": arm,
        "saved": saved,
    }
    atomic_write_json(folder / RECORD_NAME, record)
    return record


def model_fingerprint(model: str) -> dict[str, Any]:
    """Name of a model and, for a directory, a hash of its config and the ends of its weight files."""
    path = Path(model)
    if not path.is_dir():
        return {"name": model}
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix not in (".json", ".safetensors", ".bin", ".jinja"):
            continue
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(read_ends(file))
    return {"name": model, "sha256": digest.hexdigest()}


def hash_texts(texts: list[str]) -> str:
    """SHA-256 over texts in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
