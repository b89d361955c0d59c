"""Run the builder program of a checkout and check that what it wrote is a TMDB."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ...runtime.errors import UserError
from ...runtime.files import iter_lines, read_json
from .checkout import BUILDER_PROGRAM
from .git import without_credentials

logger = logging.getLogger(__name__)

PACKAGE_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
BUILT_MARKER = ".built-by-workflow"


def foreign_folder_fault(folder: Path) -> str | None:
    """Why a build must not take the place of ``folder``, or None where it is free or was built here."""
    try:
        if not folder.exists() or not any(folder.iterdir()) or (folder / BUILT_MARKER).is_file():
            return None
    except NotADirectoryError:
        return f"data.dir {str(folder)!r} is a file"
    return (
        f"data.dir {str(folder)!r} holds files that this workflow did not build, and a build would delete "
        "them. To use a finished TMDB set builder.kind: existing, else set data.dir (ODB_MM_MIX_DATA) to a "
        "new folder"
    )


def run_builder_program(checkout: Path, output: Path, arguments: list[str], install: bool) -> None:
    """Build into ``output`` with ``scripts/build_public_mm_mix.py --output DIR --overwrite``.

    Args:
        checkout: Folder of the builder.
        output: Folder that the builder fills; the caller renames it.
        arguments: Further arguments, passed on as they are.
        install: Install the builder's package into a folder beside the checkout, so that the environment of
            this workflow stays as it is pinned.

    Raises:
        UserError: the program is missing, lacks packages or fails; the message holds its last lines.
    """
    program = checkout / BUILDER_PROGRAM
    if not program.is_file():
        raise UserError(
            f"no {BUILDER_PROGRAM} in the builder", where=str(checkout), fix="check builder.repo and ref"
        )
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    paths = _python_paths(checkout, install)
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [
        sys.executable,
        str(program.resolve()),
        "--output",
        str(output.resolve()),
        "--overwrite",
        *arguments,
    ]
    logger.info("running %s", " ".join([BUILDER_PROGRAM.name, *command[2:]]))
    tail: list[str] = []
    with subprocess.Popen(
        command,
        env=environment,
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",  # a progress bar in another encoding is no reason to lose a build
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                tail = [*tail[-11:], line.rstrip()]
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    if status:
        text = "\n".join(tail) or "(it printed nothing)"
        fix = "see the builder's own message; arguments come from builder.args and builder.sizes"
        if "No space left" in text:
            fix = "free space, or set data.dir to a larger disk"
        if "ModuleNotFoundError" in text:
            fix = "install what the builder needs into this environment, or use builder.kind: hub"
        raise UserError(f"the dataset builder {_ended(status)}:\n{text}", where=str(program), fix=fix)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    hint = " (often because memory ran out)" if status == -signal.SIGKILL else ""
    return f"was ended by signal {-status}{hint}"


def _python_paths(checkout: Path, install: bool) -> list[str]:
    """What PYTHONPATH needs for the builder's package, the installed copy before the checkout itself."""
    plain = [str(folder.resolve()) for folder in (checkout / "src", checkout) if folder.is_dir()]
    if not install or not any((checkout / name).is_file() for name in PACKAGE_FILES):
        return plain
    target = checkout.with_name(checkout.name + "-site")
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout
    stamp = target / ".commit"
    if not (commit and stamp.is_file() and stamp.read_text() == commit):
        message = _install(checkout, target)
        if message:
            # without pip, build tool or network the plain checkout is what `pip install -e` would give
            logger.warning("the builder's package is used from its checkout: %s", message)
            return plain
        stamp.write_text(commit)
    _check_requirements(target)
    return [str(target.resolve()), *plain]


def _install(checkout: Path, target: Path) -> str | None:
    """Install the package alone into ``target``; returns why it cannot be done, or None."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    message = ""
    # first with the build tool that is here, then with the one that the package asks for (network)
    for more in (["--no-build-isolation"], []):
        shutil.rmtree(target, ignore_errors=True)
        done = subprocess.run(
            [*command, *more, "--target", str(target), str(checkout.resolve())],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode == 0:
            return None
        message = message or (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    shutil.rmtree(target, ignore_errors=True)
    return without_credentials(message)


def _check_requirements(target: Path) -> None:
    """Check that the packages that the builder asks for are in this environment.

    Raises:
        UserError: some are missing or have another version; all are listed, with the command that adds them.
    """
    missing = []
    for distribution in importlib.metadata.distributions(path=[str(target)]):
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                version = None
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                requirement.marker = None
                missing.append((str(requirement), version))
    if missing:
        listed = ", ".join(f"{text} (here: {version or 'missing'})" for text, version in missing)
        wanted = " ".join(f"'{text}'" for text, version in missing if version is None)
        raise UserError(
            f"the dataset builder needs packages that this environment lacks: {listed}",
            where=str(target),
            fix=(f"pip install {wanted}; " if wanted else "")
            + "or build the TMDB in an environment of its own and set builder.kind: existing",
        )


def check_contract(folder: Path) -> dict[str, Any]:
    """Check that ``folder`` is a TMDB with at least one record and the count it claims.

    Lines are counted at line feeds only and a last line without one counts too.

    Returns:
        ``metadata.json``.

    Raises:
        UserError: a file is missing, there is no record, or the counts differ.
    """
    metadata_file, records_file = folder / "metadata.json", folder / "records.jsonl"
    for file in (metadata_file, records_file):
        if not file.is_file():
            raise UserError(
                f"the builder wrote no {file.name}", where=str(folder), fix="use a builder of TMDBs"
            )
    metadata = read_json(metadata_file)
    if not isinstance(metadata, dict):
        raise UserError("metadata.json holds no object", where=str(metadata_file))
    count = sum(1 for _, line in iter_lines(records_file) if line.strip())
    if count == 0:
        raise UserError(
            "the TMDB is empty: records.jsonl has no record", where=str(records_file), fix="raise its sizes"
        )
    claimed = metadata.get("num_records")
    if isinstance(claimed, bool) or claimed != count:  # true equals 1
        raise UserError(
            f"metadata.json says num_records {json.dumps(claimed)}, records.jsonl has {count}",
            where=str(folder),
            fix="build it again; a builder that was stopped half-way leaves such a folder",
        )
    return metadata


def no_space(error: OSError, place: Path) -> UserError:
    """The user's form of ENOSPC; other errors of the system keep their own words."""
    if error.errno == errno.ENOSPC:
        free = shutil.disk_usage(place).free
        return UserError(
            f"no space left while building ({free / 1e9:.1f} GB free)",
            where=str(place),
            fix="free space, or set data.dir to a larger disk",
        )
    return UserError(f"the TMDB cannot be written: {error}", where=str(place))
