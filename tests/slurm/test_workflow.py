"""The workflow through a real SLURM: what rules ask for, where GPU jobs run, what failures leave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from workflow.conftest import clean_environment, dry_run, snakemake
from workflow.stub_programs import stub_checkout

from .cluster import Cluster

# The usual 40 s are for real clusters. Not less than a job takes: a check that finds it running adds 10 s.
QUICK = (
    *("--workflow-profile", "profiles/slurm", "--slurm-status-command", "squeue"),
    *("--slurm-init-seconds-before-status-checks", "6", "--latency-wait", "10", "--retries", "0"),
)
REPOSITORY = Path(__file__).resolve().parents[2]
GPU_CONFIG = """\
device: cuda
resources:
  train: {threads: 2, mem_mb: 1234, runtime: 17}
  evaluate: {threads: 1, mem_mb: 1000, runtime: 5}
  data: {threads: 1, mem_mb: 900, runtime: 4}
"""
# keeps its GPU for a while and tells which one it had, from when to when
HOLDING = """
import os as _os, time as _time
_start = _time.time()
_time.sleep(10)
write(out / "device.json", {"node": _os.environ.get("SLURMD_NODENAME"),
    "gpu": _os.environ.get("CUDA_VISIBLE_DEVICES"), "from": _start, "to": _time.time()})
"""


def run(
    cluster: Cluster,
    checkout: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Snakemake with the SLURM profile; stdout and stderr together."""
    found = cluster.environment
    environment = clean_environment(env) | {"SLURM_CONF": found["SLURM_CONF"]}
    environment["PATH"] = f"{Path(sys.executable).parent}:{found['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--snakefile", "Snakefile", *QUICK, *arguments],
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
        text = " ".join(arguments)
        if re.search(rf"rule_{rule}[/\b_]", text) or f"rule_{rule}" in text:
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


def make_data_here(checkout: Path) -> None:
    """Make what the trainings need without the cluster, which the first test has shown to work."""
    done = snakemake(checkout, "--configfile", "gpu.yaml", "--resources", "gpu=1", "--", "data")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def gpu_checkout(repository: Path, tmp_path: Path) -> Path:
    """A checkout with stand-in programs that wants one GPU for each training and evaluation."""
    checkout = stub_checkout(repository, tmp_path / "checkout")
    program = checkout / "workflow_scripts" / "train_accelerate.py"
    program.write_text(program.read_text() + HOLDING)
    (checkout / "gpu.yaml").write_text(GPU_CONFIG)
    return checkout


def test_each_rule_asks_for_what_it_needs_and_gpu_jobs_do_not_share(
    cluster: Cluster, gpu_checkout: Path
) -> None:
    before = len(cluster.submissions())
    done = run(cluster, gpu_checkout, "--configfile", "gpu.yaml", "--", "all")
    assert done.returncode == 0, done.stdout[-3000:]
    calls = cluster.submissions()[before:]
    train = of_rule(calls, "train")
    assert train["--gpus"] == "1"
    assert train["--cpus-per-task"] == "2"
    assert train["--mem"] == "1234"
    assert train["--time"] == "17"
    assert of_rule(calls, "valloss")["--gpus"] == "1"
    assert "--gpus" not in of_rule(calls, "build_tmdb")
    assert of_rule(calls, "build_tmdb")["--mem"] == "900"
    held = [json.loads(path.read_text()) for path in gpu_checkout.glob("outputs/embedded/*/device.json")]
    assert len(held) == 2 and all(item["gpu"] not in (None, "") for item in held)
    first, second = sorted(held, key=lambda item: item["from"])
    together = second["from"] < first["to"]
    assert together, "two trainings on four free GPUs run side by side"
    assert (first["node"], first["gpu"]) != (second["node"], second["gpu"])


def test_failed_job_names_rule_log_and_fault_and_the_rerun_does_what_is_missing(
    cluster: Cluster, gpu_checkout: Path
) -> None:
    make_data_here(gpu_checkout)
    failed = run(
        cluster,
        gpu_checkout,
        "--configfile",
        "gpu.yaml",
        "--",
        "all_odb",
        env={"STUB_FAIL": "eval_benchmark"},
    )
    assert failed.returncode != 0
    assert "Error in rule mmmu" in failed.stdout
    assert "logs/embedded/mmmu/odb.log" in failed.stdout
    assert "the stub was told to fail" in failed.stdout
    plan = dry_run(gpu_checkout, "--configfile", "gpu.yaml", "--resources", "gpu=1", "--", "all_odb")
    assert plan.runs() - {"all_odb"} == {"mmmu"}, plan.text
    again = run(cluster, gpu_checkout, "--configfile", "gpu.yaml", "--", "all_odb")
    assert again.returncode == 0, again.stdout[-3000:]


def test_cancelled_and_timed_out_jobs_end_with_their_rules_and_are_all_that_reruns(
    cluster: Cluster, gpu_checkout: Path
) -> None:
    """One run: validation loss cancels itself, MMMU-MC sleeps beyond its limit of a minute."""
    make_data_here(gpu_checkout)
    config = gpu_checkout / "gpu.yaml"
    config.write_text(config.read_text().replace("runtime: 5", "runtime: 1"))
    programs = gpu_checkout / "workflow_scripts"
    sound = {name: (programs / name).read_text() for name in ("eval_valloss.py", "eval_benchmark.py")}
    cancel = "subprocess.run(['scancel', os.environ['SLURM_JOB_ID']])"
    for name, deed in (("eval_valloss.py", cancel), ("eval_benchmark.py", "pass")):
        (programs / name).write_text(f"{sound[name]}\nimport subprocess, os, time\n{deed}\ntime.sleep(180)\n")
    failed = run(cluster, gpu_checkout, "--configfile", "gpu.yaml", "--keep-going", "--", "all_odb")
    assert failed.returncode != 0
    for rule in ("valloss", "mmmu"):
        assert f"Error in rule {rule}" in failed.stdout
        assert f"logs/embedded/{rule}/odb.log" in failed.stdout
    assert "same command" in failed.stdout
    states = {job["JobId"]: job["JobState"] for job in cluster.finished_jobs()}
    assert {"CANCELLED", "TIMEOUT"} <= set(states.values())
    for name, text in sound.items():
        (programs / name).write_text(text)
    plan = dry_run(gpu_checkout, "--configfile", "gpu.yaml", "--resources", "gpu=1", "--", "all_odb")
    assert plan.runs() - {"all_odb"} == {"valloss", "mmmu"}, plan.text
    again = run(cluster, gpu_checkout, "--configfile", "gpu.yaml", "--", "all_odb")
    assert again.returncode == 0, again.stdout[-3000:]


@pytest.mark.slow
def test_embedded_pipeline_through_sbatch(cluster: Cluster, repository: Path, tmp_path: Path) -> None:
    """The real programs, very small: data, training, both evaluations, each in a job of its own."""
    small = tmp_path / "small.yaml"
    small.write_text(
        "builder: {sizes: {total: 70}}\nsplit: {train_size: 0}\ntraining: {epochs: 1}\n"
        "evaluation: {untrained_baseline: false, mmmu: {rows: 12}}\n"
        "resources:\n"
        + "".join(
            f"  {stage}: {{threads: 1, mem_mb: 4000, runtime: 20}}\n"
            for stage in ("data", "train", "evaluate", "compare")
        )
    )
    target = tmp_path / "work"
    target.mkdir()
    done = run(
        cluster,
        target,
        *(
            "--snakefile",
            str(repository / "Snakefile"),
            "--workflow-profile",
            str(repository / "profiles/slurm"),
        ),
        *("--configfile", str(small), "--", "all_odb"),
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    arm = target / "outputs" / "embedded" / "odb"
    summary = json.loads((arm / "train_summary_odb.json").read_text())
    assert summary["samples_audit"]["complete"] is True
    assert summary["emitted_samples"] == summary["samples_audit"]["expected"] == 67
    assert (arm / "eval_out_accelerate_valloss" / "eval_results.json").is_file()
    assert (arm / "mmmu_mc_likelihood_accelerate" / "predictions.jsonl").is_file()


def small_run(tmp_path: Path, training: str) -> tuple[Path, list[str]]:
    """Folder and arguments of a small training of the real programs through the cluster."""
    work = tmp_path / "work"
    work.mkdir()
    config = tmp_path / "small.yaml"
    config.write_text(
        f"builder: {{sizes: {{total: 70}}}}\nsplit: {{train_size: 0}}\ntraining: {training}\nresources:\n"
        + "".join(f"  {stage}: {{threads: 1, mem_mb: 4000, runtime: 20}}\n" for stage in ("data", "train"))
    )
    places = [
        "--snakefile",
        str(REPOSITORY / "Snakefile"),
        "--workflow-profile",
        str(REPOSITORY / "profiles/slurm"),
    ]
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "snakemake",
            *places[:2],
            "--cores",
            "2",
            "--configfile",
            str(config),
            "--",
            "data",
        ],
        cwd=work,
        env=clean_environment({}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return work, [*places, "--configfile", str(config), "--", "train_odb"]


@pytest.mark.slow
def test_one_training_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """One allocation of two nodes, a launcher on each, one gloo rank per launcher."""
    work, arguments = small_run(tmp_path, "{epochs: 2, num_machines: 2}")
    before = len(cluster.submissions())
    done = run(cluster, work, *arguments)
    assert done.returncode == 0, done.stdout[-3000:]
    asked = of_rule(cluster.submissions()[before:], "train")
    assert asked["--nodes"] == "2"
    summary = json.loads((work / "outputs/embedded/odb/train_summary_odb.json").read_text())
    assert summary["world_size"] == 2
    audit = summary["samples_audit"]
    assert (audit["complete"], audit["lost"], audit["doubled"]) == (True, 0, 0)
    assert audit["distinct"] == audit["expected"] == 134
    assert summary["emitted_samples"] == 134 + audit["padding_duplicates"]


@pytest.mark.slow
def test_preempted_training_keeps_its_steps(cluster: Cluster, tmp_path: Path) -> None:
    """SIGTERM to the steps of a job, as ``--signal=TERM@SECONDS`` sends it before the time limit."""
    work, arguments = small_run(tmp_path, "{epochs: 40}")
    arm = work / "outputs/embedded/odb"

    def preempt() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            log = arm / "step_log.jsonl"
            if log.exists() and len(log.read_text().splitlines()) > 20:
                for job in cluster.run("squeue", "-h", "-o", "%i").split():
                    cluster.run("scancel", "--signal=TERM", job, check=False)
                return
            time.sleep(0.3)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(preempt)
        stopped = run(cluster, work, *arguments)
        waiting.result()
    assert stopped.returncode != 0
    assert "Error in rule train" in stopped.stdout
    assert "logs/embedded/train/odb.log" in stopped.stdout
    assert not (arm / "checkpoint.json").exists()
    log = (work / "logs/embedded/train/odb.log").read_text()
    assert "the same command continues" in log, log[-2000:]

    again = run(cluster, work, *arguments)
    assert again.returncode == 0, again.stdout[-3000:]
    summary = json.loads((arm / "train_summary_odb.json").read_text())
    assert summary["resumed_at_step"] >= 20
    audit = summary["samples_audit"]
    assert (audit["complete"], audit["lost"], audit["doubled"]) == (True, 0, 0)
    assert audit["distinct"] == audit["expected"] == 67 * 40
