"""The workflow through a real SLURM: what rules ask for, where GPU jobs run, what failures leave."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from odb_workflow.workflow.lifecycle import WAY_ON
from workflow.conftest import dry_run, snakemake
from workflow.stub_programs import stub_checkout

from .cluster import Cluster
from .commands import jobs_of, of_rule, run
from .stopping import check_time_limit

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


def make_data_here(checkout: Path) -> None:
    """Make what the trainings need without the cluster, which takes a tenth of the time."""
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


def test_trainings_ask_for_what_they_need_and_do_not_share_a_gpu(
    cluster: Cluster, gpu_checkout: Path
) -> None:
    make_data_here(gpu_checkout)
    before = len(cluster.submissions())
    done = run(cluster, gpu_checkout, "--configfile", "gpu.yaml", "--", "train_odb", "train_standard")
    assert done.returncode == 0, done.stdout[-3000:]
    calls = cluster.submissions()[before:]
    train = of_rule(calls, "train")
    assert train["--gpus"] == "1"
    assert train["--cpus-per-task"] == "2"
    assert train["--mem"] == "1234"
    assert train["--time"] == "17"
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
    before = len(cluster.submissions())
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
    assert WAY_ON in failed.stdout
    assert cluster.states(jobs_of(failed.stdout, "mmmu")) == ["FAILED"]
    asked = of_rule(cluster.submissions()[before:], "valloss")
    assert (asked["--gpus"], asked["--mem"], asked["--time"]) == ("1", "1000", "5")
    plan = dry_run(gpu_checkout, "--configfile", "gpu.yaml", "--resources", "gpu=1", "--", "all_odb")
    assert plan.runs() - {"all_odb"} == {"mmmu"}, plan.text
    again = run(cluster, gpu_checkout, "--configfile", "gpu.yaml", "--", "all_odb")
    assert again.returncode == 0, again.stdout[-3000:]


def test_cancelled_and_timed_out_jobs_end_with_their_rules_and_are_all_that_reruns(
    cluster: Cluster, gpu_checkout: Path, small_data: Path, tmp_path: Path
) -> None:
    """One run: validation loss cancels itself, MMMU-MC sleeps beyond its limit of a minute.

    Meanwhile a real training reaches its limit, too, but with the signal before it.
    """
    make_data_here(gpu_checkout)
    config = gpu_checkout / "gpu.yaml"
    config.write_text(config.read_text().replace("runtime: 5", "runtime: 1"))
    programs = gpu_checkout / "workflow_scripts"
    sound = {name: (programs / name).read_text() for name in ("eval_valloss.py", "eval_benchmark.py")}
    cancel = "subprocess.run(['scancel', os.environ['SLURM_JOB_ID']])"
    for name, deed in (("eval_valloss.py", cancel), ("eval_benchmark.py", "pass")):
        (programs / name).write_text(f"{sound[name]}\nimport subprocess, os, time\n{deed}\ntime.sleep(180)\n")
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(check_time_limit, cluster, small_data, tmp_path)
        failed = run(cluster, gpu_checkout, "--configfile", "gpu.yaml", "--keep-going", "--", "all_odb")
        training.result()
    assert failed.returncode != 0
    for rule in ("valloss", "mmmu"):
        assert f"Error in rule {rule}" in failed.stdout
        assert f"logs/embedded/{rule}/odb.log" in failed.stdout
    assert WAY_ON in failed.stdout
    assert cluster.states(jobs_of(failed.stdout, "valloss")) == ["CANCELLED"]
    assert cluster.states(jobs_of(failed.stdout, "mmmu")) == ["TIMEOUT"]
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
    before = len(cluster.submissions())
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
    built = of_rule(cluster.submissions()[before:], "build_tmdb")
    assert (built["--cpus-per-task"], built["--mem"], built["--time"]) == ("1", "4000", "20")
    assert "--gpus" not in built
    arm = target / "outputs" / "embedded" / "odb"
    summary = json.loads((arm / "train_summary_odb.json").read_text())
    assert summary["samples_audit"]["complete"] is True
    assert summary["emitted_samples"] == summary["samples_audit"]["expected"] == 67
    assert (arm / "eval_out_accelerate_valloss" / "eval_results.json").is_file()
    assert (arm / "mmmu_mc_likelihood_accelerate" / "predictions.jsonl").is_file()
