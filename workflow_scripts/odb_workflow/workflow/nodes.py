"""Several machines of one SLURM job."""

from __future__ import annotations

import argparse
import os
import subprocess

from ..runtime.errors import UserError

FIRST_PORT, PORTS = 20000, 12000
"""Below the range from which Linux takes the ports of outgoing connections (from 32768)."""


def job_port() -> int:
    """A port that all nodes of the job know and that other jobs on the same nodes do not use."""
    return FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % PORTS


def allocated_nodes() -> list[str]:
    """Names of the job's nodes, in SLURM's order.

    Raises:
        UserError: not inside a SLURM job, or its nodes cannot be read.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        raise UserError(
            "training.num_machines > 1 needs a SLURM job",
            fix="run with --workflow-profile profiles/slurm, or set training.num_machines to 1",
        )
    # Snakemake's job step removes SLURM_NODELIST from the environment.
    listed = _output(["squeue", "--noheader", "--jobs", job, "--format", "%N"])
    return _output(["scontrol", "show", "hostnames", listed]).split()


def node_address(name: str) -> str:
    """The address of a node as SLURM knows it, which on some clusters is not its name."""
    for word in _output(["scontrol", "show", "node", name]).split():
        key, _, value = word.partition("=")
        if key == "NodeAddr" and value:
            return value
    return name


def srun_command(options: argparse.Namespace, program: list[str]) -> list[str]:
    """The command that starts ``program`` once on each machine of the job.

    Raises:
        UserError: not inside a SLURM job, or the job has fewer nodes than machines.
    """
    nodes = allocated_nodes()
    if len(nodes) < options.machines:
        raise UserError(
            f"{options.machines} machines asked for, the job has {len(nodes)}: {', '.join(nodes)}"
        )
    return [
        *(
            "srun",
            "--nodes",
            str(options.machines),
            "--ntasks",
            str(options.machines),
            "--ntasks-per-node",
            "1",
        ),
        *("--cpus-per-task", str(options.threads), "--kill-on-bad-exit=1", "--label"),
        *program,
    ]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"`{' '.join(command)}` failed: {error}") from None
    return done.stdout.strip()
