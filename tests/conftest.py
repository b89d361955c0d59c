"""Fixtures that several test folders share: a tiny model, a tiny TMDB, the input cases."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

REPOSITORY = Path(__file__).resolve().parent.parent


class FilesStayTogether(LoadScopeScheduling):
    """Several processes: a file's tests run in one of them, and all of SLURM's, which share a cluster.

    ``--dist loadgroup`` would say the same with marks, but xdist 3.8 does not see them under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "slurm" if "/slurm/" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesStayTogether:
    """How ``pytest -n`` shares out the tests."""
    return FilesStayTogether(config, log)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout under test."""
    return REPOSITORY


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    """A writable copy of the input cases, one folder each."""
    return Path(shutil.copytree(REPOSITORY / "tests" / "cases", tmp_path / "cases"))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3-VL (2+2 layers, hidden 64) as a Hugging Face directory; do not write into it."""
    from odb_workflow.model.embedded import build_embedded_model

    texts = [
        "what color is the circle?\n(A) red\n(B) blue\n(C) green\nAnswer with the option letter only.",
        "does the image contain a rectangle? yes no gray black brown yellow triangle shape image",
        "Read the text in the picture. Describe this picture in detail. There is one shape on the left.",
    ]
    folder = tmp_path_factory.mktemp("tiny-model") / "model"
    build_embedded_model(
        texts * 2,
        folder,
        vocab_size=400,
        text_hidden_size=64,
        vision_hidden_size=64,
        text_heads=2,
        text_kv_heads=1,
    )
    return folder


TINY_SIZES = {
    "aokvqa": 12,
    "chinese_text_recognition": 4,
    "iiit5k": 6,
    "image_textualization": 6,
    "orand_car_a": 6,
    "sharegpt4o": 8,
    "vqa_like": 18,
}


@pytest.fixture(scope="session")
def tiny_tmdb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TMDB of 60 mixed records by the embedded builder (text-only ones too); do not write into it."""
    builder = str(REPOSITORY / "dataset_builder")
    sys.path.insert(0, builder)
    try:
        from odb_mm_mix.mix import items
        from odb_mm_mix.writer import write_tmdb
    finally:
        sys.path.remove(builder)
    folder = tmp_path_factory.mktemp("tiny-tmdb") / "tmdb"
    write_tmdb(items(TINY_SIZES, seed=7), folder, seed=7, overwrite=False)
    return folder
