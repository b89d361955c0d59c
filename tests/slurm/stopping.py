"""Stopping a training that runs in a job of the cluster."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from odb_workflow.workflow.lifecycle import WAY_ON

from .cluster import Cluster, wait_until
from .commands import PLACES, REPOSITORY, copy_of, jobs_of, run

LOG = "logs/embedded/train/{}.log"


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes whose working directory is ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder.resolve()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def jobs_in(cluster: Cluster, work: Path) -> list[str]:
    """Jobs of a folder that SLURM still knows as waiting, running or ending."""
    listed = [line.split(maxsplit=1) for line in cluster.run("squeue", "-h", "-o", "%i %Z").splitlines()]
    return [job for job, folder in listed if folder == str(work)]


def steps_logged(work: Path, arm: str = "odb") -> int:
    """Lines of the step log; 0 where there is none."""
    log = work / "outputs/embedded" / arm / "step_log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def resume_step(work: Path, arm: str = "odb") -> int:
    """The step of the last resume point."""
    latest = json.loads((work / "outputs/embedded" / arm / "resume/latest.json").read_text())
    return int(latest["folder"].removeprefix("step-"))


def stop_when(cluster: Cluster, work: Path, *command: str, arm: str) -> str:
    """Run ``command JOB`` once the training of ``work`` has logged 20 steps; its log at the end.

    Raises:
        TimeoutError: the training did not come so far, or did not end; its jobs are canceled.
    """
    try:
        wait_until(lambda: steps_logged(work, arm) > 20, "20 steps", 180)
        (job,) = jobs_in(cluster, work)
        cluster.run(*command, job)
        return ended(cluster, work, job, arm)
    except BaseException:
        cancel_all(cluster, work)
        raise


def preempt_when(cluster: Cluster, work: Path, steps: int, arm: str) -> str:
    """Submit a job of a higher partition that needs every node, once the training has logged so many steps;
    the training's log when it has ended for that.

    Raises:
        TimeoutError: as ``stop_when``.
    """
    try:
        wait_until(lambda: steps_logged(work, arm) > steps, f"{steps} steps", 180)
        urgent = ("--partition", "urgent", "--nodes", "2", "--exclusive", "--output", "/dev/null")
        cluster.run("sbatch", *urgent, "--wrap", "sleep 1")
        log = work / LOG.format(arm)
        kept = "stopped by a signal after step"
        wait_until(lambda: kept in log.read_text(), kept, 60)
        return log.read_text()
    except BaseException:
        cancel_all(cluster, work)
        raise


def ended(cluster: Cluster, work: Path, job: str, arm: str = "odb", seconds: float = 60) -> str:
    """The training's log when its job has ended."""
    wait_until(lambda: job not in jobs_in(cluster, work), f"end of job {job}", seconds)
    return (work / LOG.format(arm)).read_text()


def cancel_all(cluster: Cluster, work: Path) -> None:
    """Cancel what is left of a run, so that its Snakemake ends."""
    for job in jobs_in(cluster, work):
        cluster.run("scancel", job, check=False)


def check_time_limit(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """A training with the profile's ``--signal=TERM@SECONDS`` reaches its time limit; the retry resumes.

    The limit is shortened when the training has begun, so that the test need not wait for it: SLURM then
    warns the job within 30 seconds.
    """
    profile = tmp_path / "profile"
    profile.mkdir()
    text = (REPOSITORY / "profiles/slurm/config.yaml").read_text()
    extra = "slurm_extra: \"'--signal=TERM@180'\""
    assert extra in text
    (profile / "config.yaml").write_text(
        f"{text}\nset-resources:\n  train:\n    {extra.replace('180', '60')}\n"
    )
    # long enough never to end by itself in the test
    work, arguments = copy_of(data, tmp_path, "{epochs: 2000}", "limited")
    arguments[arguments.index(PLACES[3])] = str(profile)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_reach_limit_twice, cluster, work)
        done = run(cluster, work, *arguments, retries=None)
        first, second, step, log = waiting.result()
    assert done.returncode != 0
    assert f"stopped by a signal after step {step}; the same command continues" in log, log[-2000:]
    assert jobs_of(done.stdout, "train") == [first, second], "the profile's one retry"
    # the first ended by itself before its limit
    assert cluster.states([first, second]) == ["FAILED", "CANCELLED"]
    assert done.stdout.count("Error in rule train") >= 2
    assert LOG.format("odb") in done.stdout
    assert WAY_ON in done.stdout


def _reach_limit_twice(cluster: Cluster, work: Path) -> tuple[str, str, int, str]:
    """Both jobs, the step of the first one's resume point, and its log."""
    try:
        wait_until(lambda: steps_logged(work) > 20, "20 steps", 180)
        (first,) = jobs_in(cluster, work)
        minutes, _, _ = cluster.run("squeue", "-h", "-j", first, "-o", "%M").strip().partition(":")
        cluster.run("scontrol", "update", f"JobId={first}", f"TimeLimit={int(minutes) + 2}")
        log = ended(cluster, work, first, seconds=100)
        step = resume_step(work)
        resumed = f"continuing after step {step} of an interrupted run"
        wait_until(lambda: resumed in (work / LOG.format("odb")).read_text(), resumed, 180)
        (second,) = jobs_in(cluster, work)
        cluster.run("scancel", second)
        return first, second, step, log
    except BaseException:
        cancel_all(cluster, work)
        raise
