"""One SLURM for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster, missing_requirement, running_cluster
from .commands import make_data


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A started cluster of two nodes with two GPUs each; skips by name where SLURM cannot be started."""
    why = missing_requirement()
    if why:
        pytest.skip(f"SLURM: {why}")
    # a short path: the munge socket's name may have about 100 characters
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with running_cluster(folder, cpus=4, memory_mb=16_000) as started:
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def small_data(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and base model of the small trainings, made once; each test copies the folder."""
    folder = tmp_path_factory.mktemp("small") / "data"
    make_data(folder)
    return folder
