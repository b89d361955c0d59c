"""Real trainings through a real SLURM: on two nodes, and canceled."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from odb_workflow.workflow.lifecycle import WAY_ON

from .cluster import Cluster, wait_until
from .commands import PLACES, copy_of, jobs_of, local, of_rule, run
from .stopping import preempt_when, processes_in, resume_step, stop_when


@pytest.mark.slow
def test_one_training_on_two_nodes(cluster: Cluster, small_data: Path, tmp_path: Path) -> None:
    """One allocation of two nodes, a launcher on each, one gloo rank per launcher, the job's port."""
    work, arguments = copy_of(small_data, tmp_path, "{epochs: 2, num_machines: 2}")
    before = len(cluster.submissions())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, cluster, work, *arguments)
        wait_until(lambda: len(launchers(work)) == 2 or running.done(), "two launchers", 120)
        seen = launchers(work)
        done = running.result()
    assert done.returncode == 0, done.stdout[-3000:]
    asked = of_rule(cluster.submissions()[before:], "train")
    assert asked["--nodes"] == "2"
    (job,) = jobs_of(done.stdout, "train")
    assert cluster.nodes_of_step(job) == ["ci1", "ci2"]
    port = str(20000 + int(job) % 12000)
    assert seen == {("ci1", "0", port), ("ci2", "1", port)}
    summary = json.loads((work / "outputs/embedded/odb/train_summary_odb.json").read_text())
    assert summary["world_size"] == 2
    audit = summary["samples_audit"]
    assert (audit["complete"], audit["lost"], audit["doubled"]) == (True, 0, 0)
    assert audit["distinct"] == audit["expected"] == 134
    assert summary["emitted_samples"] == 134 + audit["padding_duplicates"]


def launchers(work: Path) -> set[tuple[str, str, str]]:
    """Node, rank of the node and port of each torchrun of a run."""
    found = set()
    for process in processes_in(work):
        try:
            command, node = process.cmdline(), process.environ().get("SLURMD_NODENAME", "")
        except psutil.Error:
            continue
        if "torch.distributed.run" in command:
            value = dict(itertools.pairwise(command))
            found.add((node, value["--node-rank"], value["--master-port"]))
    return found


@pytest.mark.slow
def test_canceled_and_preempted_training_ends_with_the_same_weights(
    cluster: Cluster, small_data: Path, tmp_path: Path
) -> None:
    """A plain ``scancel``: a resume point, no process left, and the same command goes on. Then a job of a
    higher partition takes the nodes: the training ends in its grace time, and the profile's retry goes on.
    """
    # fixed batches: those of ODB after a resume are not the ones it would have made
    work, arguments = copy_of(small_data, tmp_path, "{epochs: 16}", arm="standard")
    whole, whole_arguments = copy_of(small_data, tmp_path, "{epochs: 16}", "uninterrupted", "standard")
    arm = work / "outputs/embedded/standard"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stop_when, cluster, work, "scancel", arm="standard")
        stopped = run(cluster, work, *arguments)
        log = waiting.result()
    assert stopped.returncode != 0
    assert cluster.states(jobs_of(stopped.stdout, "train")) == ["CANCELLED"]
    assert "Error in rule train" in stopped.stdout
    assert "logs/embedded/train/standard.log" in stopped.stdout
    assert WAY_ON in stopped.stdout
    assert not (arm / "checkpoint.json").exists()
    # regular resume points are 15 minutes apart: this one is the signal's
    canceled_at = resume_step(work, "standard")
    assert canceled_at >= 20
    assert f"stopped by a signal after step {canceled_at}; the same command continues" in log, log[-2000:]
    assert processes_in(work) == []

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(local, whole, *PLACES[:2], *whole_arguments[len(PLACES) :])
        waiting = pool.submit(preempt_when, cluster, work, canceled_at + 20, "standard")
        again = run(cluster, work, *arguments, retries=None)
        log = waiting.result()
        other.result()
    assert again.returncode == 0, again.stdout[-3000:]
    assert f"continuing after step {canceled_at} of an interrupted run" in log
    # SLURM requeues only what it had to kill: a job that ends in its grace time has failed
    assert cluster.states(jobs_of(again.stdout, "train")) == ["FAILED", "COMPLETED"]
    summary = json.loads((arm / "train_summary_standard.json").read_text())
    preempted_at = summary["resumed_at_step"]
    assert preempted_at > canceled_at + 20
    assert f"stopped by a signal after step {preempted_at}; the same command continues" in log, log[-2000:]
    audit = summary["samples_audit"]
    assert (audit["complete"], audit["lost"], audit["doubled"]) == (True, 0, 0)
    assert audit["distinct"] == audit["expected"] == 67 * 16
    assert weights(arm) == weights(whole / "outputs/embedded/standard")


def weights(arm: Path) -> dict[str, str]:
    """SHA-256 of each file of tensors in a checkpoint."""
    files = json.loads((arm / "checkpoint.json").read_text())["files"]
    found = {file["path"]: file["sha256"] for file in files if file["path"].endswith(".safetensors")}
    assert found
    return found
