"""Files that appear whole or not at all, and strict JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import UserError


@contextlib.contextmanager
def atomic_open(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file beside ``path`` and rename it over ``path`` when the block ends without error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        encoding = None if "b" in mode else "utf-8"
        newline = None if "b" in mode else "\n"
        with os.fdopen(descriptor, mode, encoding=encoding, newline=newline) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 with ``\\n`` line ends, whole or not at all."""
    with atomic_open(path) as handle:
        handle.write(text)


def finite_or_null(value: Any) -> Any:
    """The same structure with NaN and infinities replaced by None, so that JSON stays valid."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # numpy and torch scalars
        return finite_or_null(value.item())
    if hasattr(value, "tolist"):
        return finite_or_null(value.tolist())
    return value


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text without NaN or infinities; characters are kept, not escaped."""
    return json.dumps(finite_or_null(value), ensure_ascii=False, allow_nan=False, indent=indent)


def atomic_write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    atomic_write_text(path, dump_json(value, indent=2) + "\n")


def atomic_write_jsonl(path: str | Path, rows: Iterable[Any]) -> int:
    """Write one JSON document per line, whole or not at all; returns the number of lines."""
    count = 0
    with atomic_open(path) as handle:
        for row in rows:
            handle.write(dump_json(row) + "\n")
            count += 1
    return count


def read_json(path: str | Path) -> Any:
    """Read a JSON file; a byte-order mark, which some editors write, is passed over.

    Raises:
        UserError: the file is missing, unreadable or not JSON; names the file.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError("file not found", where=str(path)) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"not a readable JSON file: {error}", where=str(path)) from error


def iter_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield (1-based line number, line without its end) splitting at ``\\n`` only.

    ``str.splitlines`` would also split at U+2028, U+2029 and U+0085, which are legal inside JSON strings.
    """
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            yield number, line.rstrip(b"\r\n")


def read_jsonl(path: str | Path) -> list[Any]:
    """Read all documents of a small JSON-lines file; empty lines are passed over."""
    return [json.loads(line) for _, line in iter_lines(path) if line.strip()]


def sha256_file(path: str | Path, chunk_bytes: int = 1 << 20) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(chunk_bytes):
            digest.update(chunk)
    return digest.hexdigest()


def read_ends(path: str | Path, end_bytes: int = 1 << 22) -> bytes:
    """The first and the last ``end_bytes`` of a file, or all of one that is no larger than both.

    Their hash tells weight files apart without reading 100 GB.
    """
    with open(path, "rb") as handle:
        head = handle.read(end_bytes)
        if os.fstat(handle.fileno()).st_size > 2 * end_bytes:
            handle.seek(-end_bytes, os.SEEK_END)
        return head + handle.read(end_bytes)


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield a fresh folder beside ``path``; it takes the place of ``path`` when the block ends without error.

    On an error the folder is removed and what stood at ``path`` is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    old = temporary.with_suffix(".old")
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o777 & ~umask)
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if old.exists() and not path.exists():
            os.replace(old, path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
