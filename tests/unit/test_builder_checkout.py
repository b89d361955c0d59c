"""The checkout of a builder: real git on repositories made here, and folders that are not ours."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.builders.checkout import GIT_MARKER, clone_builder, copy_embedded_builder
from odb_workflow.tmdb.builders.git import split_credentials, without_credentials

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "scripts/build_public_mm_mix.py"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(repo: Path, text: str) -> str:
    program = repo / PROGRAM
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(text)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", text[:20])
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Commits one (tag v1), two (main), three (branch next, with a slash branch beside it)."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    git(folder, "init", "-q")
    commit(folder, "print('one')\n")
    git(folder, "tag", "v1")
    commit(folder, "print('two')\n")
    git(folder, "checkout", "-q", "-b", "fix/next")
    commit(folder, "print('three')\n")
    git(folder, "checkout", "-q", "main")
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return tmp_path / "deps" / "builder"


def text(checkout: Path) -> str:
    return (checkout / PROGRAM).read_text()


@pytest.mark.parametrize(
    ("ref", "pinned", "content"),
    [
        ("main", False, "two"),
        ("fix/next", False, "three"),
        ("v1", True, "one"),
        (None, False, "two"),
        ("full", True, "one"),
        ("short", True, "one"),
    ],
)
def test_every_kind_of_ref(
    repo: Path,
    checkout: Path,
    caplog: pytest.LogCaptureFixture,
    ref: str | None,
    pinned: bool,
    content: str,
) -> None:
    first = git(repo, "rev-parse", "v1")
    ref = {"full": first, "short": first[:9]}.get(ref or "", ref)
    with caplog.at_level(logging.WARNING):
        record = clone_builder(str(repo), ref, checkout)
    assert content in text(checkout)
    assert record["pinned"] is pinned and len(record["commit"]) == 40
    assert (f"ref: {record['commit']}" in caplog.text) is not pinned


def test_nothing_is_fetched_until_repo_or_ref_change(repo: Path, checkout: Path) -> None:
    first = clone_builder(str(repo), "main", checkout)
    commit(repo, "print('four')\n")
    assert clone_builder(str(repo), "main", checkout) == first
    assert "two" in text(checkout)
    assert clone_builder(str(repo), "main", checkout, refresh=True)["commit"] != first["commit"]
    assert "four" in text(checkout)
    clone_builder(str(repo), "v1", checkout)
    assert "one" in text(checkout)
    hidden = repo.with_name("gone")
    repo.rename(hidden)
    assert clone_builder(str(repo), "v1", checkout)["pinned"]
    clone_builder(str(hidden), "fix/next", checkout)
    assert "three" in text(checkout)


def test_a_bundle_and_a_bare_mirror_are_repositories_too(repo: Path, checkout: Path, tmp_path: Path) -> None:
    bundle, mirror = tmp_path / "builder.bundle", tmp_path / "mirror.git"
    git(repo, "bundle", "create", str(bundle), "--all")
    git(tmp_path, "clone", "-q", "--mirror", str(repo), str(mirror))
    clone_builder(str(bundle), "v1", checkout)
    assert "one" in text(checkout)
    clone_builder(mirror.as_uri(), "fix/next", checkout)
    assert "three" in text(checkout)


def test_a_wrong_ref_names_those_there_are_and_leaves_nothing(repo: Path, checkout: Path) -> None:
    with pytest.raises(UserError, match=r"'v9' is not there(.|\n)*fix/next, main, v1"):
        clone_builder(str(repo), "v9", checkout)
    assert not checkout.exists()
    clone_builder(str(repo), "v1", checkout)
    with pytest.raises(UserError, match="is not there"):
        clone_builder(str(repo), "v9", checkout)
    assert "one" in text(checkout)


def test_a_repository_that_is_no_builder(repo: Path, checkout: Path) -> None:
    git(repo, "rm", "-q", PROGRAM)
    git(repo, "commit", "-q", "-m", "gone")
    with pytest.raises(UserError, match=r"has no scripts/build_public_mm_mix\.py"):
        clone_builder(str(repo), "main", checkout)


def fake_git(folder: Path, script: str) -> str:
    folder.mkdir()
    program = folder / "git"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_network_faults_are_tried_again_others_are_not(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODB_WORKFLOW_RETRY_SECONDS", "0")
    calls = tmp_path / "calls"
    for name, message, expected in (
        ("a", "fatal: unable to access 'https://x/': Could not resolve host: x", 4),
        ("b", "fatal: repository 'https://x/' not found", 1),
    ):
        calls.write_text("")
        monkeypatch.setenv(
            "PATH", fake_git(tmp_path / name, f'echo x >> {calls}; echo "{message}" >&2; exit 128')
        )
        with pytest.raises(UserError, match=r"mirror, a local path or a git bundle"):
            clone_builder("https://example.org/builder.git", "main", checkout)
        assert calls.read_text().count("x") == expected
        assert not checkout.exists()


def test_no_prompt_and_no_password_anywhere(
    repo: Path,
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ODB_WORKFLOW_RETRY_SECONDS", "0")
    monkeypatch.delenv("GIT_CONFIG_COUNT", raising=False)
    with caplog.at_level(logging.DEBUG), pytest.raises(UserError) as failed:
        clone_builder("https://user:s3cret@127.0.0.1:9/builder.git", "main", checkout)
    assert "s3cret" not in str(failed.value) + caplog.text
    assert without_credentials("https://a:b@c/d and ssh://e@f") == "https://c/d and ssh://f"
    assert split_credentials("git@github.com:o/r.git") == ("git@github.com:o/r.git", None)
    seen = tmp_path / "seen"
    path = fake_git(
        tmp_path / "bin",
        f'env | grep -E "^GIT_(TERMINAL|CONFIG_(KEY|VALUE)_0)" > {seen}; echo "$@" >> {seen}; exit 128',
    )
    monkeypatch.setenv("PATH", path)
    with pytest.raises(UserError):
        clone_builder("https://user:s3cret@example.org/builder.git", "main", checkout)
    said = seen.read_text()
    assert "GIT_TERMINAL_PROMPT=0" in said
    assert "GIT_CONFIG_VALUE_0=https://example.org/builder.git" in said
    assert "s3cret" not in said.splitlines()[-1], "the password stays off the command line and .git/config"


def test_a_folder_that_is_not_ours_is_used_or_refused_never_changed(
    repo: Path, checkout: Path, tmp_path: Path
) -> None:
    checkout.parent.mkdir(parents=True)
    git(tmp_path, "clone", "-q", str(repo), str(checkout))
    (checkout / PROGRAM).write_text("print('mine')\n")
    record = clone_builder(None, None, checkout)
    assert record["changed_by_hand"] is True and record["pinned"] is False
    with pytest.raises(UserError, match="left alone"):
        clone_builder(str(repo), "v1", checkout)
    assert "mine" in text(checkout)
    assert not (checkout / GIT_MARKER).exists()
    other = tmp_path / "notes"
    other.mkdir()
    (other / "diary.txt").write_text("dear diary")
    for make in (
        lambda: clone_builder(str(repo), "v1", other),
        lambda: clone_builder(None, None, other),
        lambda: copy_embedded_builder(ROOT / "dataset_builder", other),
    ):
        with pytest.raises(UserError, match=r"something else|left alone"):
            make()
    assert [path.name for path in other.iterdir()] == ["diary.txt"]


def test_changes_by_hand_in_our_checkout_are_not_lost(repo: Path, checkout: Path) -> None:
    clone_builder(str(repo), "v1", checkout)
    (checkout / PROGRAM).write_text("print('mine')\n")
    with pytest.raises(UserError, match="changed by hand"):
        clone_builder(str(repo), "main", checkout)
    assert "mine" in text(checkout)


def test_the_program_copies_the_embedded_builder_and_records_it(checkout: Path, tmp_path: Path) -> None:
    program = ROOT / "workflow_scripts" / "clone_dataset_builder.py"
    command = [sys.executable, str(program), "--kind", "embedded", "--checkout", str(checkout)]
    for _ in range(2):
        done = subprocess.run(
            [*command, "--record", str(tmp_path / "record.json")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["kind"] == "embedded" and len(record["sha256"]) == 64
    assert (checkout / PROGRAM).is_file()
    assert not list(checkout.rglob("__pycache__"))


def test_a_clone_that_fails_ends_with_status_1_and_no_traceback(checkout: Path, tmp_path: Path) -> None:
    program = ROOT / "workflow_scripts" / "clone_dataset_builder.py"
    done = subprocess.run(
        [
            sys.executable,
            str(program),
            "--kind",
            "git",
            "--repo",
            str(tmp_path / "none"),
            "--checkout",
            str(checkout),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "bundle" in done.stderr
