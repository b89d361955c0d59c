"""A finished run of the whole workflow with stand-in programs, and ways to ask Snakemake about it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .stub_programs import stub_checkout

FOLLOWS = "input files updated by another job"
REASONS = re.compile(r"^    (?P<reason>[a-z][^\n]*):\n        (?P<rules>[^\n]*)$", re.MULTILINE)
MARKER = re.compile(r"^Job stats:\n.*?\n(?P<rows>.*?)\n\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Plan:
    """What a dry run says."""

    jobs: Mapping[str, int]
    text: str
    status: int
    messages: tuple[str, ...] = field(default=())
    reasons: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Reason to the rules that have it, as Snakemake lists them at the end."""

    def causes(self) -> set[str]:
        """Rules that run for a reason of their own, not because of another job of this run."""
        own = [rules for reason, rules in self.reasons.items() if reason != FOLLOWS]
        return {rule for rules in own for rule in rules}

    def runs(self) -> set[str]:
        """Names of the rules with jobs, targets left out."""
        return {name for name in self.jobs if name not in {"all", "data", "eval_valloss", "benchmark"}}


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without this project's variables, then ``extra``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ODB_", "STUB_", "SNAKEMAKE"))}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, **(extra or {})}


def snakemake(
    checkout: Path, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Snakemake on a checkout; stdout and stderr together."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(checkout / "Snakefile"),
            "--cores",
            "2",
            *arguments,
        ],
        cwd=cwd or checkout,
        env=clean_environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )


def plan_of(text: str, status: int) -> Plan:
    """Read a dry run's output."""
    found = MARKER.search(text)
    jobs: dict[str, int] = {}
    for line in found.group("rows").splitlines() if found else ():
        name, count = line.split()
        if name != "total" and not name.startswith("-"):
            jobs[name] = int(count)
    messages = tuple(re.findall(r"^Job \d+: (.*?)\s*$", text, re.MULTILINE))
    _, _, listed = text.rpartition("\nReasons:\n")
    reasons = {reason: frozenset(rules.split(", ")) for reason, rules in REASONS.findall(listed)}
    return Plan(jobs, text, status, messages, reasons)


def dry_run(checkout: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Plan:
    """``snakemake -n``; forked from this process, so that Snakemake is imported once for all dry runs."""
    import snakemake.cli  # noqa: F401

    with tempfile.TemporaryFile() as output:
        command = ["-n", "--cores", "2", *arguments]
        process = multiprocessing.get_context("fork").Process(
            target=_dry_run_child, args=(checkout, command, clean_environment(env), output.fileno())
        )
        process.start()
        process.join(timeout=120)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    return plan_of(text, process.exitcode or 0)


def _dry_run_child(checkout: Path, command: list[str], environment: dict[str, str], output: int) -> None:
    import snakemake.cli

    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False, buffering=1)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False, buffering=1)
    # Handlers that earlier tests of this process left hold streams that are closed by now.
    logging.getLogger().handlers.clear()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(checkout)
    # The package of this checkout, not the one that the tests imported.
    for name in [name for name in sys.modules if name.split(".")[0] == "odb_workflow"]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not path.endswith("workflow_scripts")]
    sys.argv = ["snakemake", *command]
    snakemake.cli.main(command)


@pytest.fixture(scope="session")
def _finished_run(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = stub_checkout(repository, tmp_path_factory.mktemp("finished") / "checkout")
    done = snakemake(checkout, "all")
    assert done.returncode == 0, done.stdout
    return checkout


@pytest.fixture(scope="session")
def finished(_finished_run: Path) -> Path:
    """A checkout with a finished run; only for tests that change no file in it."""
    return _finished_run


@pytest.fixture
def finished_copy(_finished_run: Path, tmp_path: Path) -> Path:
    """The same at the same path names, for tests that change files: a copy with times and records kept."""
    target = tmp_path / "checkout"
    shutil.copytree(_finished_run, target, symlinks=True)
    return target


@pytest.fixture
def plan(finished: Path) -> Callable[..., Plan]:
    """Ask what would run on the finished run: ``plan("all", env={...})``."""

    def ask(*arguments: str, env: Mapping[str, str] | None = None) -> Plan:
        return dry_run(finished, *arguments, env=env)

    return ask
