"""A training that ended without its Snakemake seeing it: the same command publishes what it left.

Snakemake deletes the declared outputs of a job that it saw start and not end (Ctrl-C while the model was
being saved, or killed before the training ended), then starts it again. Copies of them stand in a folder
that is not declared, with the fingerprint of the training. The workflow removes it where a training is asked
for again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..runtime.errors import UserError
from ..runtime.files import atomic_directory, atomic_write_json, dump_json, read_json, sha256_file

FINISHED_NAME = ".finished"
FINGERPRINT_NAME = "fingerprint.json"
RECORD_NAME = "checkpoint.json"


def keep_finished(folder: Path, names: Iterable[str], parts: dict[str, Any]) -> None:
    """Keep copies of a finished training's small files; the last thing that a training writes.

    Args:
        names: Files of ``folder``, ``checkpoint.json`` among them.
        parts: What another training must have equal to be this one.
    """
    with atomic_directory(folder / FINISHED_NAME) as kept:
        for name in names:
            shutil.copy2(folder / name, kept / name)
        atomic_write_json(kept / FINGERPRINT_NAME, parts)


def publish_finished(folder: Path, parts: dict[str, Any], saved: bool) -> bool:
    """Put the files of this very training back where they are missing; False where there is nothing to put.

    Args:
        saved: The saved model is wanted, too; its files must have the recorded checksums.
    """
    kept = folder / FINISHED_NAME
    if (folder / RECORD_NAME).exists() or not kept.is_dir():
        return False
    try:
        record = read_json(kept / RECORD_NAME)
        if read_json(kept / FINGERPRINT_NAME) != json.loads(dump_json(parts)) or (
            saved and not record["saved"]
        ):
            return False
        model = folder / record["model_dir"]
        if any(sha256_file(model / file["path"]) != file["sha256"] for file in record["files"]):
            return False
        names = sorted(path.name for path in kept.iterdir() if path.name != FINGERPRINT_NAME)
        for name in sorted(names, key=lambda name: name == RECORD_NAME):  # the record last
            shutil.copy2(kept / name, folder / f".{name}.part")
            os.replace(folder / f".{name}.part", folder / name)
    except (UserError, KeyError, OSError):
        return False  # it cannot be read or is not whole: train
    return True
