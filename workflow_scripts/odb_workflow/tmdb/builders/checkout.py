"""Checkout of a dataset builder: a copy of the embedded one, or a real ``git clone`` at a ref.

A folder that this workflow did not make is never changed: it is used as it stands, or refused.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from ...runtime.errors import UserError
from ...runtime.files import atomic_directory, atomic_write_json, read_json
from .git import Git, split_credentials, without_credentials

logger = logging.getLogger(__name__)

BUILDER_PROGRAM = Path("scripts") / "build_public_mm_mix.py"
EMBEDDED_MARKER = ".embedded-builder"
GIT_MARKER = Path(".git") / "odb-checkout.json"
_FULL_COMMIT = re.compile(r"[0-9a-f]{40}")


def copy_embedded_builder(source: Path, checkout: Path) -> dict[str, Any]:
    """Copy the builder that comes with this repository; the checkout appears whole or not at all.

    Returns:
        What was checked out; ``sha256`` changes with any file of the builder.

    Raises:
        UserError: something else stands at ``checkout``.
    """
    if _occupied(checkout) and not _is_our_copy(checkout):
        raise UserError(
            "the folder holds something else than a copy of the embedded builder",
            where=str(checkout),
            fix="set builder.checkout (ODB_MM_MIX_RECIPE_ROOT) to another folder, or remove this one",
        )
    with atomic_directory(checkout) as folder:
        shutil.copytree(
            source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
        digest = hashlib.sha256()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
        (folder / EMBEDDED_MARKER).write_text("a copy; edit dataset_builder/ instead\n", encoding="utf-8")
    return {"kind": "embedded", "repo": None, "ref": None, "commit": None, "sha256": digest.hexdigest()}


def clone_builder(
    repo: str | None, ref: str | None, checkout: Path, *, refresh: bool = False
) -> dict[str, Any]:
    """Bring ``checkout`` to ``ref`` of ``repo``; nothing is fetched while repository and ref stay the same.

    Args:
        repo: URL, local path, or bundle. None: ``checkout`` is used as it stands.
        ref: Branch, tag, full or short commit; None: the default branch (warned about).
        checkout: Folder of the work tree.
        refresh: Fetch although repository and ref are those of the last time.

    Returns:
        kind, repo (without credentials), ref, resolved commit, whether the ref pins it, and (only for a
        checkout that was not made here) whether its files were changed by hand.

    Raises:
        UserError: git is missing, the repository cannot be reached, the ref does not exist, the checkout was
            changed by hand or is no dataset builder.
    """
    if shutil.which("git") is None:
        raise UserError("git is not installed", fix="install git, or use builder.kind: embedded")
    if repo and Path(repo).expanduser().exists():
        repo = str(Path(repo).expanduser().resolve())
    clean, _ = split_credentials(repo) if repo else (None, None)
    git = Git(checkout, repo)
    if _occupied(checkout) and not (checkout / GIT_MARKER).is_file():
        record = _as_it_stands(git, clean, ref)
    else:
        if repo is None:
            raise UserError(
                "builder.kind: git needs a repository", where="builder.repo (--repo)", fix="set it"
            )
        record = _bring_to(git, clean or repo, ref, refresh)
    if not (checkout / BUILDER_PROGRAM).is_file():
        raise UserError(
            f"the repository has no {BUILDER_PROGRAM} at {ref or 'its default branch'}",
            where=clean or str(checkout),
            fix="set builder.repo and builder.ref to a dataset builder",
        )
    if not record["pinned"]:
        logger.warning(
            "builder.ref %s does not pin a commit: another checkout may hold another builder. "
            "To pin what is used now: ref: %s",
            "is not set and" if ref is None else repr(ref),
            record["commit"],
        )
    return record


def _is_our_copy(checkout: Path) -> bool:
    project = checkout / "pyproject.toml"
    return (checkout / EMBEDDED_MARKER).is_file() or (
        project.is_file() and 'name = "odb-mm-mix-embedded"' in project.read_text(encoding="utf-8")
    )


def _occupied(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _as_it_stands(git: Git, repo: str | None, ref: str | None) -> dict[str, Any]:
    """The record of a folder that the user put there; it is only read."""
    folder = git.folder
    is_git = (folder / ".git").exists()
    head = git.resolve("HEAD") if is_git else None
    wanted = _resolve(git, ref) if is_git and ref else None
    if ref and (head is None or wanted != head):
        raise UserError(
            f"the folder was not made by this workflow and is not at builder.ref {ref!r}: it is left alone",
            where=str(folder),
            fix="check the ref out there yourself, or set builder.checkout (ODB_MM_MIX_RECIPE_ROOT) to "
            "another folder",
        )
    if not (folder / BUILDER_PROGRAM).is_file():
        raise UserError(
            f"the folder holds something else than a dataset builder (no {BUILDER_PROGRAM})",
            where=str(folder),
            fix="set builder.checkout (ODB_MM_MIX_RECIPE_ROOT) to another folder, or remove this one",
        )
    logger.info("using the builder in %s as it stands", folder)
    return {
        "kind": "git",
        "repo": repo,
        "ref": ref,
        "commit": head,
        "pinned": bool(ref and head and head.startswith(ref.lower())),
        "changed_by_hand": git.changed() if is_git else None,
    }


def _bring_to(git: Git, repo: str, ref: str | None, refresh: bool) -> dict[str, Any]:
    checkout = git.folder
    last = read_json(checkout / GIT_MARKER) if (checkout / GIT_MARKER).is_file() else None
    if last and git.changed():
        raise UserError(
            "files of the builder's checkout were changed by hand and would be lost",
            where=str(checkout),
            fix="keep them elsewhere and remove the folder, or commit them and set builder.repo to it",
        )
    if last and last["repo"] == repo:
        same = last["ref"] == ref and git.resolve(last["commit"]) is not None
        known = git.resolve(ref) if ref and _FULL_COMMIT.fullmatch(ref) else None
        if same and not refresh:
            commit = last["commit"]
            logger.info("the checkout is at %s already", commit)
        else:
            if known is None:
                git.fetch()
            commit = _found(git, ref)
        git.check_out(commit)
    else:
        with atomic_directory(checkout) as folder:
            fresh = Git(folder, git.url)
            fresh.clone()
            commit = _found(fresh, ref)
            fresh.check_out(commit)
            _remember(fresh, repo, ref, commit)
    pinned = ref is not None and (commit.startswith(ref.lower()) or git.resolve(f"refs/tags/{ref}") == commit)
    _remember(git, repo, ref, commit)
    return {"kind": "git", "repo": repo, "ref": ref, "commit": commit, "pinned": pinned}


def _remember(git: Git, repo: str, ref: str | None, commit: str) -> None:
    atomic_write_json(git.folder / GIT_MARKER, {"repo": repo, "ref": ref, "commit": commit})


def _resolve(git: Git, ref: str | None) -> str | None:
    names = ["origin/HEAD", "HEAD"] if ref is None else [f"origin/{ref}", f"refs/tags/{ref}", ref]
    return next((commit for name in names if (commit := git.resolve(name))), None)


def _found(git: Git, ref: str | None) -> str:
    commit = _resolve(git, ref)
    if commit is None:
        names = ", ".join(git.names()[:12]) or "none"
        what = "the repository has no default branch" if ref is None else f"builder.ref {ref!r} is not there"
        raise UserError(
            what,
            where=without_credentials(git.url or str(git.folder)),
            fix=f"use a branch, tag or commit of it; branches and tags: {names}",
        )
    return commit
