"""Snakemake on the cluster of the tests, and what it said and asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from workflow.conftest import clean_environment

from .cluster import Cluster

# The usual 40 s are for real clusters. Not less than a job takes: a check that finds it running adds 10 s.
QUICK = (
    *("--workflow-profile", "profiles/slurm", "--slurm-status-command", "squeue"),
    *("--slurm-init-seconds-before-status-checks", "6", "--latency-wait", "10"),
)
REPOSITORY = Path(__file__).resolve().parents[2]
_SUBMITTED = re.compile(r"SLURM jobid (\d+) \(log: \S*/rule_(\w+)/")


def run(
    cluster: Cluster,
    checkout: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    retries: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Snakemake with the SLURM profile; stdout and stderr together.

    Args:
        retries: None takes the profile's own.
    """
    given = () if retries is None else ("--retries", str(retries))
    found = cluster.environment
    environment = clean_environment(env) | {"SLURM_CONF": found["SLURM_CONF"]}
    environment["PATH"] = f"{Path(sys.executable).parent}:{found['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--snakefile", "Snakefile", *QUICK, *given, *arguments],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def of_rule(submissions: list[list[str]], rule: str) -> dict[str, str]:
    """Options of the sbatch call of a rule, for example ``{"--mem": "1234"}``."""
    for arguments in submissions:
        if any(f"/rule_{rule}/" in part for part in arguments if part.endswith("%j.log")):
            return {key: value for key, _, value in (part.partition("=") for part in options(arguments))}
    raise AssertionError(f"no submission of {rule}: {submissions}")


def options(arguments: list[str]) -> list[str]:
    """``--name value`` and ``--name=value`` alike as ``--name=value``."""
    result: list[str] = []
    for part in arguments:
        if part.startswith("-"):
            result.append({"-t": "--time", "-p": "--partition", "-A": "--account"}.get(part, part))
        elif result and "=" not in result[-1]:
            result[-1] += f"={part}"
    return result


def jobs_of(output: str, rule: str) -> list[str]:
    """SLURM's ids of the jobs that Snakemake submitted for a rule, in order."""
    jobs = [job for job, name in _SUBMITTED.findall(output) if name == rule]
    assert jobs, f"no job of {rule}: {output[-3000:]}"
    return jobs


def copy_of(
    data: Path, tmp_path: Path, training: str, name: str = "work", arm: str = "odb"
) -> tuple[Path, list[str]]:
    """Folder and arguments of a small training of the real programs; ``data`` is made already."""
    work = tmp_path / name
    shutil.copytree(data, work, symlinks=True)
    config = tmp_path / f"{name}.yaml"
    config.write_text(SMALL.replace("training: {}", f"training: {training}"))
    return work, [*PLACES, "--configfile", str(config), "--", f"train_{arm}"]


def make_data(folder: Path) -> None:
    """Everything that a small training needs, made without the cluster."""
    folder.mkdir()
    config = folder.with_suffix(".yaml")
    config.write_text(SMALL)
    local(folder, *PLACES[:2], "--configfile", str(config), "--", "data")


def local(folder: Path, *arguments: str) -> None:
    """Snakemake on this machine; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", *arguments],
        cwd=folder,
        env=clean_environment({}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


SMALL = "builder: {sizes: {total: 70}}\nsplit: {train_size: 0}\ntraining: {}\nresources:\n" + "".join(
    f"  {stage}: {{threads: 1, mem_mb: 4000, runtime: 20}}\n" for stage in ("data", "train")
)
PLACES = [
    *("--snakefile", str(REPOSITORY / "Snakefile")),
    *("--workflow-profile", str(REPOSITORY / "profiles/slurm")),
]
