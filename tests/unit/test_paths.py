"""Every run has folders of its own, data included: one run never takes the place of the data of another."""

from __future__ import annotations

from pathlib import Path

from odb_workflow.config.load import load_config
from odb_workflow.workflow.paths import Paths


def paths(repository: Path, run: str | None = None, **environment: str) -> Paths:
    settings = {"run": run} if run else {}
    return Paths(load_config(repository, environment=environment, command_line=settings).config)


def test_default_run_keeps_its_names(repository: Path) -> None:
    found = paths(repository)
    assert (found.data, found.benchmark) == ("data/embedded-tmdb", "data/embedded-mmmu")


def test_runs_share_no_folder(repository: Path) -> None:
    one, other = paths(repository), paths(repository, run="mini")
    for name in ("data", "data_identity", "benchmark", "output", "results", "logs", "validation"):
        assert getattr(one, name) != getattr(other, name), name
    assert (other.data, other.benchmark) == ("data/mini-tmdb", "data/mini-mmmu")


def test_named_folder_is_used_as_it_is(repository: Path) -> None:
    assert paths(repository, ODB_MM_MIX_DATA="elsewhere/tmdb").data == "elsewhere/tmdb"
