"""A real SLURM on one machine, for tests: munged, slurmctld and several slurmd, all under one folder.

Nothing outside that folder is touched but SLURM's own cgroups: the commands find the cluster through
``SLURM_CONF`` and its own munge socket. The GPUs are device files that behave like the null device, so SLURM
places and binds them as it would real ones (``CUDA_VISIBLE_DEVICES`` is set), while nothing can compute on
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "munged", "mungekey")
FREEZER = Path("/sys/fs/cgroup/freezer")
"""Where it can be written, processes are tracked by cgroup, as on real clusters: SLURM then signals the first
process of a step alone, elsewhere each of them."""


def missing_requirement() -> str | None:
    """Why SLURM cannot be started here, or None where it can."""
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=search) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "starting slurmd needs root"
    return None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def wait_until(ready: Callable[[], object], what: str, seconds: float) -> None:
    """Ask until ``ready()`` is true.

    Raises:
        TimeoutError: it was not in time; the message names ``what``.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)


@dataclass
class Cluster:
    """``nodes`` nodes with ``gpus`` GPUs and ``cpus`` CPUs each, all on this machine."""

    folder: Path
    nodes: int = 2
    gpus: int = 2
    cpus: int = 4
    memory_mb: int = 8000
    daemons: list[subprocess.Popen] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make SLURM's commands talk to this cluster.

        Snakemake's job step removes every ``SLURM_*`` variable, so the commands that a job starts are found
        in a folder of small scripts that set ``SLURM_CONF`` again; that of sbatch also keeps its arguments.
        """
        path = f"{self.folder}/bin:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def submissions(self) -> list[list[str]]:
        """Arguments of every sbatch call so far."""
        log = self.folder / "sbatch.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def run(self, *command: str, check: bool = True) -> str:
        """Output of one SLURM command."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def start(self) -> None:
        """Write the configuration, start the daemons, wait until every node is idle."""
        self._configure()
        self._write_commands()
        munge = self.folder / "munge"
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--socket={munge}/socket",
            f"--key-file={munge}/key",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        self._wait_for(lambda: (munge / "socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for node in range(1, self.nodes + 1):
            self._daemon("slurmd", "-D", "-N", f"ci{node}", "-f", str(self.folder / "slurm.conf"))
        self._wait_for(
            lambda: (
                self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%t", check=False).split()
                == ["idle"] * self.nodes
            ),
            "slurmd",
        )

    def stop(self) -> None:
        """Cancel every job and end the daemons, the last started first."""
        self.run("scancel", "--user=root", check=False)
        time.sleep(1)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        self.daemons.clear()
        for node in range(1, self.nodes + 1):
            for folder, _, _ in os.walk(FREEZER / f"slurm_ci{node}", topdown=False):
                with contextlib.suppress(OSError):  # a process that is only just ending
                    os.rmdir(folder)

    def finished_jobs(self) -> list[dict[str, str]]:
        """One dictionary per ended job, from the completion log (``JobId``, ``JobState``, ``Tres`` ...)."""
        log = self.folder / "jobcomp.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [dict(item.split("=", 1) for item in line.split() if "=" in item) for line in lines]

    def states(self, jobs: list[str], seconds: float = 30) -> list[str]:
        """How each of these jobs ended, in order; waits until all of them have.

        Raises:
            TimeoutError: one did not end in time.
        """
        ended: dict[str, str] = {}

        def all_ended() -> bool:
            ended.update({job["JobId"]: job["JobState"] for job in self.finished_jobs()})
            return set(jobs) <= set(ended)

        wait_until(all_ended, f"end of jobs {jobs}", seconds)
        return [ended[job] for job in jobs]

    def nodes_of_step(self, job: str) -> list[str]:
        """Nodes on which the first step of a job was started, once for each task."""
        return [
            log.name.split(".")[1]
            for log in sorted(self.folder.glob("slurmd.*.log"))
            for line in log.read_text(errors="replace").splitlines()
            if f"launch task StepId={job}.0 " in line
        ]

    def _daemon(self, *command: str) -> None:
        log = open(self.folder / f"{command[0]}.{len(self.daemons)}.out", "wb")  # noqa: SIM115 - lives as long as the daemon
        self.daemons.append(
            subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        )

    def _wait_for(self, ready, what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                logs = {
                    path.name: path.read_text(errors="replace")[-500:] for path in self.folder.glob("*.out")
                }
                raise RuntimeError(f"{what} did not come up in {seconds:.0f} s: {logs}")
            time.sleep(0.2)

    def _configure(self) -> None:
        folder = self.folder
        for name in ("munge", "state", "spool", "gpu"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "munge").chmod(0o755)
        subprocess.run(
            ["mungekey", "--create", f"--keyfile={folder}/munge/key"],
            env=self.environment_path_only(),
            check=True,
        )
        for index in range(self.gpus):
            device = folder / "gpu" / f"gpu{index}"
            if not device.exists():
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        controller, *node_ports = _free_ports(self.nodes + 1)
        host = socket.gethostname().split(".")[0]
        lines = [
            "ClusterName=ci",
            f"SlurmctldHost={host}(127.0.0.1)",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/socket",
            f"SlurmctldPort={controller}",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            f"SlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdLogFile={folder}/slurmd.%n.log",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            "SlurmdParameters=config_overrides",
            "MailProg=/bin/true",
            "MpiDefault=none",
            f"ProctrackType=proctrack/{'cgroup' if os.access(FREEZER, os.W_OK) else 'linuxproc'}",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/linux",
            "JobAcctGatherFrequency=5",
            "ReturnToService=2",
            "MinJobAge=300",
            "KillWait=5",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=sched_interval=2,bf_interval=2",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "DefMemPerCPU=500",
            # without it a request that no node can serve would wait for ever
            "EnforcePartLimits=ALL",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "GresTypes=gpu",
            "AccountingStorageType=accounting_storage/none",
            "JobCompType=jobcomp/filetxt",
            f"JobCompLoc={folder}/jobcomp.log",
        ]
        gres = []
        for number, port in enumerate(node_ports, start=1):
            (folder / "spool" / f"ci{number}").mkdir(exist_ok=True)
            lines.append(
                f"NodeName=ci{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} "
                f"RealMemory={self.memory_mb} Gres=gpu:{self.gpus} State=UNKNOWN"
            )
            gres.append(f"NodeName=ci{number} Name=gpu File={folder}/gpu/gpu[0-{self.gpus - 1}]")
        lines.append(
            "PartitionName=debug Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 GraceTime=60 State=UP"
        )
        lines.append("PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP")
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "gres.conf").write_text("\n".join(gres) + "\n")
        (folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={FREEZER.parent}\n"
        )

    def _write_commands(self) -> None:
        (self.folder / "bin").mkdir(exist_ok=True)
        search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        for name in ("sbatch", "squeue", "srun", "scontrol", "scancel", "sinfo", "sacct"):
            real = shutil.which(name, path=search)
            if real is None:
                continue
            keep = ""
            if name == "sbatch":
                code = "import json, sys; print(json.dumps(sys.argv[1:]))"
                keep = f"{sys.executable} -c '{code}' \"$@\" >> {self.folder}/sbatch.jsonl\n"
            script = self.folder / "bin" / name
            script.write_text(
                f'#!/bin/sh\nexport SLURM_CONF={self.folder}/slurm.conf\n{keep}exec {real} "$@"\n'
            )
            script.chmod(0o755)

    def environment_path_only(self) -> dict[str, str]:
        """The caller's variables with the system folders on the path."""
        return {key: value for key, value in self.environment.items() if key != "SLURM_CONF"}


@contextlib.contextmanager
def running_cluster(folder: Path, **sizes: int):
    """A started cluster for the block; stopped afterwards whatever happens."""
    cluster = Cluster(folder, **sizes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
