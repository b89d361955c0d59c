"""A copy of the TMDB on the node's own disk, made once and used again.

Many small image files on a shared disk are slow to read in random order.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..runtime.errors import UserError
from ..runtime.files import atomic_directory, atomic_write_json, read_json, sha256_file
from ..runtime.lock import folder_lock

logger = logging.getLogger(__name__)

STAMP_NAME = ".staged.json"


def staged_copy(source: Path, local: Path) -> Path:
    """Copy the TMDB ``source`` to ``local`` unless it is there already; returns ``local``.

    The copy is complete when it appears. It is used again when ``metadata.json`` and ``records.jsonl`` are
    the same as in the source; otherwise it is made anew. A folder that was not made here is never replaced.

    Raises:
        UserError: no source, a foreign folder at ``local``, or no space on the node's disk.
    """
    if not (source / "records.jsonl").is_file():
        raise UserError(
            "no TMDB to stage", where=str(source), fix="build it first, or give --source-data DIR"
        )
    stamp = {
        name: sha256_file(source / name)
        for name in ("metadata.json", "records.jsonl")
        if (source / name).exists()
    }
    # one process per node copies, the others wait for it here
    lock = local.parent / f".{local.name}.staging"
    lock.mkdir(parents=True, exist_ok=True)
    with _waiting_lock(lock):
        if local.exists():
            if not (local / STAMP_NAME).exists():
                raise UserError(
                    "the folder for the staged copy exists and was not made by staging",
                    where=str(local),
                    fix="give another --local-data, or remove that folder",
                )
            if read_json(local / STAMP_NAME) == stamp:
                logger.info("using the staged copy %s", local)
                return local
        logger.info("staging %s to %s", source, local)
        try:
            with atomic_directory(local) as part:
                shutil.copytree(source, part, dirs_exist_ok=True)
                atomic_write_json(part / STAMP_NAME, stamp)
        except (OSError, shutil.Error) as error:
            raise UserError(
                f"cannot stage the TMDB: {error}",
                where=str(local),
                fix="free space on that disk, give another --local-data, or leave it out",
            ) from error
    return local


@contextlib.contextmanager
def _waiting_lock(folder: Path) -> Iterator[None]:
    """Like ``folder_lock``, but waits until the holder is done."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder_lock(folder, "staging the TMDB"))
                break
            except UserError:
                time.sleep(1)
        yield
