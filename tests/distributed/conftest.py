"""What the training runs of this folder are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_runs import TrainingInput, validated


@pytest.fixture(scope="session")
def given(tiny_model_dir: Path, tiny_tmdb: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingInput:
    """A tiny model, a tiny TMDB and its validation; do not write into them."""
    return validated(tiny_model_dir, tiny_tmdb, tmp_path_factory.mktemp("validation"))
