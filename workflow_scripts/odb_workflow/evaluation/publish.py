"""The files of a result appear together, after all of them were written; until then the previous ones
stand.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odb_workflow.runtime.errors import UserError
from odb_workflow.runtime.files import atomic_write_json, atomic_write_jsonl


def publish(folder: str | Path, documents: Mapping[str, Any]) -> None:
    """Write each document beside its place, then rename all of them in the order given.

    Args:
        folder: Where the results go.
        documents: File name to content; a name ending in ``.jsonl`` takes an iterable of lines. Put the file
            that others wait for last.

    Raises:
        UserError: the folder cannot be written; what stood there is untouched.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".staging.", dir=folder))
    except OSError as error:
        raise UserError(f"cannot write results: {error}", where=str(folder)) from error
    try:
        for name, content in documents.items():
            write = atomic_write_jsonl if name.endswith(".jsonl") else atomic_write_json
            write(staging / name, content)
        for name in documents:
            os.replace(staging / name, folder / name)
    except OSError as error:
        raise UserError(
            f"cannot write results: {error}", where=str(folder), fix="free some space, then run again"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
