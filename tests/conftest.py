"""Fixtures that several test folders share: a tiny model, a tiny TMDB, the input cases."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout under test."""
    return REPOSITORY


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    """A writable copy of the input cases, one folder each."""
    return Path(shutil.copytree(REPOSITORY / "tests" / "cases", tmp_path / "cases"))
