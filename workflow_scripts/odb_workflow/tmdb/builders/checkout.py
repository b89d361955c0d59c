"""Checkout of a dataset builder: a copy of the embedded one, or a real ``git clone`` at a ref."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from ...runtime.errors import UserError
from ...runtime.files import atomic_directory

logger = logging.getLogger(__name__)

BUILDER_PROGRAM = Path("scripts") / "build_public_mm_mix.py"
NETWORK_ATTEMPTS = 4
# What git says where a second attempt can help; a refused ref or a missing repository is final.
_PASSING_FAULT = re.compile(
    r"could not resolve host|timed? ?out|connection (was )?(reset|refused)|early eof|unexpected disconnect"
    r"|network is unreachable|http 5\d\d|returned error: (429|5\d\d)|failed to connect|ssl_|gnutls",
    re.IGNORECASE,
)
_FULL_COMMIT = re.compile(r"[0-9a-f]{40}")


def without_credentials(text: str) -> str:
    """The same text with user and password taken out of every URL."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", text)


def copy_embedded_builder(source: Path, checkout: Path) -> dict[str, Any]:
    """Copy the builder that comes with this repository; the checkout appears whole or not at all."""
    with atomic_directory(checkout) as folder:
        shutil.copytree(
            source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    return {"kind": "embedded", "repo": None, "ref": None, "commit": None}


def clone_builder(repo: str, ref: str | None, checkout: Path) -> dict[str, Any]:
    """Bring ``checkout`` to ``ref`` of ``repo`` with git; a checkout that is already there is reused.

    Args:
        repo: URL, local path, or bundle.
        ref: Branch, tag, full or short commit; None: the remote's default branch (warned about).
        checkout: Folder of the work tree.

    Returns:
        kind, repo (without credentials), ref, resolved commit, and whether the ref pins it.

    Raises:
        UserError: git is missing, the repository cannot be reached, the ref does not exist, or the checkout
            is no dataset builder.
    """
    if shutil.which("git") is None:
        raise UserError("git is not installed", fix="install git, or use builder.kind: embedded")
    if Path(repo).exists():
        repo = str(Path(repo).resolve())
    existing = _origin(checkout)
    if existing is not None and existing != repo:
        logger.info("the checkout is of another repository; it is cloned anew")
        existing = None
    if existing is None:
        with atomic_directory(checkout) as folder:
            _clone(repo, folder)
            commit = _check_out(folder, repo, ref)
    else:
        known = _resolve(checkout, ref) if ref and _FULL_COMMIT.fullmatch(ref) else None
        if known is None:
            _git(["fetch", "--quiet", "--tags", "--prune", "--force", "origin"], checkout, repo)
        commit = _check_out(checkout, repo, ref)
    pinned = ref is not None and (commit.startswith(ref.lower()) or _is_tag(checkout, ref))
    if not pinned:
        logger.warning(
            "builder.ref %s does not pin a commit: a later run may build other data; pin it with ref: %s",
            "is not set and" if ref is None else repr(ref),
            commit,
        )
    if not (checkout / BUILDER_PROGRAM).is_file():
        raise UserError(
            f"the repository has no {BUILDER_PROGRAM} at {ref or 'its default branch'}",
            where=without_credentials(repo),
            fix="set builder.repo and builder.ref to a dataset builder",
        )
    return {"kind": "git", "repo": without_credentials(repo), "ref": ref, "commit": commit, "pinned": pinned}


def _clone(repo: str, folder: Path) -> None:
    def empty() -> None:
        for item in folder.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink()

    _git(["clone", "--quiet", "--no-checkout", "--", repo, str(folder)], None, repo, before_retry=empty)


def _check_out(folder: Path, repo: str, ref: str | None) -> str:
    commit = _resolve(folder, ref)
    if commit is None:
        known = _run(["for-each-ref", "--format=%(refname:lstrip=3)", "refs/remotes/origin"], folder).stdout
        tags = _run(["tag", "--list"], folder).stdout
        names = ", ".join(sorted({*known.split(), *tags.split()} - {"HEAD"})[:12]) or "none"
        raise UserError(
            f"builder.ref {ref!r} is not in the repository",
            where=without_credentials(repo),
            fix=f"use a branch, tag or commit of it; branches and tags: {names}",
        )
    _git(["checkout", "--quiet", "--force", "--detach", commit], folder, repo)
    _git(["clean", "-qfdx"], folder, repo)
    return commit


def _resolve(folder: Path, ref: str | None) -> str | None:
    names = ["origin/HEAD", "HEAD"] if ref is None else [f"origin/{ref}", f"refs/tags/{ref}", ref]
    for name in names:
        done = _run(["rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], folder)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def _is_tag(folder: Path, ref: str) -> bool:
    return _run(["rev-parse", "--verify", "--quiet", f"refs/tags/{ref}"], folder).returncode == 0


def _origin(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():
        return None
    done = _run(["remote", "get-url", "origin"], checkout)
    return done.stdout.strip() if done.returncode == 0 else None


def _run(arguments: list[str], folder: Path | None) -> subprocess.CompletedProcess[str]:
    # never ask for a password: a job has nobody to answer
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "LC_ALL": "C"}
    at = ["-C", str(folder)] if folder is not None else []
    return subprocess.run(
        ["git", *at, *arguments], capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )


def _git(arguments: list[str], folder: Path | None, repo: str, before_retry: Any = None) -> None:
    wait = float(os.environ.get("ODB_WORKFLOW_RETRY_SECONDS", "2"))
    for attempt in range(1, NETWORK_ATTEMPTS + 1):
        done = _run(arguments, folder)
        if done.returncode == 0:
            return
        message = without_credentials(done.stderr.strip())
        if attempt == NETWORK_ATTEMPTS or not _PASSING_FAULT.search(message):
            break
        logger.warning(
            "git %s failed (%s); attempt %d of %d", arguments[0], message, attempt + 1, NETWORK_ATTEMPTS
        )
        time.sleep(wait * 2 ** (attempt - 1))
        if before_retry:
            before_retry()
    raise UserError(
        f"git {arguments[0]} failed: {message}",
        where=without_credentials(repo),
        fix="check builder.repo; without network set it to a mirror, a local path or a git bundle",
    )
