"""Where a result comes from: command, versions, commit, device, times. Never a token, never a home folder."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "accelerate",
    "deepspeed",
    "datasets",
    "online-dynamic-batching",
    "snakemake",
    "pillow",
    "pandas",
    "numpy",
)


def now() -> str:
    """UTC time as ISO 8601 with seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that can change a result; None where one is missing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def git_state(folder: str | Path | None = None) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that holds this code; None where it is not a checkout."""
    folder = Path(folder or Path(__file__).resolve().parent)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    status = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def without_home(text: str) -> str:
    """The same text with the home folder written as ``~`` and the working directory as ``.``."""
    for folder, short in ((os.getcwd(), "."), (str(Path.home()), "~")):
        if len(folder) > 1:
            text = text.replace(folder, short)
    return text


def command_line() -> str:
    """The command as typed, home and working folders shortened."""
    return " ".join(without_home(part) for part in [Path(sys.executable).name, *sys.argv])


def provenance() -> dict[str, Any]:
    """What to store beside a result: command, git state, versions, platform, time."""
    return {
        "command": command_line(),
        "git": git_state(),
        "versions": package_versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "time": now(),
    }
