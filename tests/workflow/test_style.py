"""What CONTRIBUTING.md asks of every change: formatted, linted, nothing for Snakemake's linter to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "snakefmt": ["-m", "snakefmt", "--check", "Snakefile", "rules"],
    "snakemake --lint": ["-m", "snakemake", "--lint"],
}


@pytest.mark.parametrize("name", CHECKS)
def test_style(repository: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, *CHECKS[name]], cwd=repository, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
