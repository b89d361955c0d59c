"""The launcher: command lines, devices, ports, signals, no process left behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import launch
import psutil
import pytest
from odb_workflow.runtime.errors import UserError
from odb_workflow.workflow.code_version import code_version
from odb_workflow.workflow.devices import lock_devices
from odb_workflow.workflow.gpus import visible_devices
from odb_workflow.workflow.nodes import job_port
from odb_workflow.workflow.ports import choose_port

LAUNCH = Path(launch.__file__)


def options(**given: object) -> argparse.Namespace:
    values = {
        **{"processes": 1, "machines": 1, "gpus": 0, "threads": 4, "port": 0, "accelerate": False},
        **{"node": False, "program": ["train.py", "--lr", "1"]},
        **given,
    }
    return argparse.Namespace(**values)


def start(program: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(LAUNCH), *arguments, "--", str(program)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_one_process_without_accelerate_is_the_program_itself() -> None:
    assert launch.command(options(), 0) == [sys.executable, "train.py", "--lr", "1"]


def test_one_cpu_process_through_accelerate() -> None:
    made = launch.command(options(accelerate=True), 0)
    assert "launch" in made and "--cpu" in made and "--multi_gpu" not in made
    assert made[made.index("--num_processes") + 1] == "1"
    assert made[-3:] == ["train.py", "--lr", "1"]
    assert Path(made[made.index("--config_file") + 1]).is_file()


def test_several_processes_get_a_rendezvous_also_on_cpu() -> None:
    made = launch.command(options(accelerate=True, processes=2), 29555)
    assert "--multi_gpu" in made and "--cpu" not in made
    assert made[made.index("--main_process_port") + 1] == "29555"
    assert made[made.index("--num_cpu_threads_per_process") + 1] == "2"


def test_several_machines_start_torchrun_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "allocated_nodes", lambda: ["node1", "node2"])
    monkeypatch.setattr(launch, "node_address", lambda name: f"{name}.cluster")
    monkeypatch.setenv("SLURM_NODEID", "1")
    made = launch.command(options(machines=2, processes=4, gpus=4), 20001)
    assert made[made.index("--nnodes") + 1] == "2"
    assert made[made.index("--node-rank") + 1] == "1"
    assert made[made.index("--master-addr") + 1] == "node1.cluster"
    assert made[made.index("--master-port") + 1] == "20001"


def test_port_from_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1234567")
    assert job_port() == 20000 + 1234567 % 12000


def test_machines_without_slurm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    from odb_workflow.workflow.nodes import allocated_nodes

    with pytest.raises(UserError, match="needs a SLURM job"):
        allocated_nodes()


def test_program_sees_no_device_where_none_is_asked_for(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, json; print(json.dumps(dict(os.environ)))")
    output, _ = start(
        program, "--threads", "3", CUDA_VISIBLE_DEVICES="0,1", OMP_NUM_THREADS="1"
    ).communicate()
    seen = json.loads(output)
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["OMP_NUM_THREADS"] == "1"
    assert seen["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize("status", [0, 1, 7])
def test_exit_status_is_the_program_s(tmp_path: Path, status: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"raise SystemExit({status})")
    process = start(program)
    process.communicate(timeout=30)
    assert process.returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_whole_job_and_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "def stop(number, frame):\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(128 + number)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = start(program)
    assert process.stdout is not None
    ready = process.stdout.readline().split()
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert output.count("saved") == 1
    assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int(ready[1]))


def test_training_may_save_after_its_launcher_has_ended(tmp_path: Path) -> None:
    """`accelerate launch` dies of SIGTERM at once; the training below it needs time for its resume point."""
    training = tmp_path / "training.py"
    training.write_text(
        "import pathlib, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    time.sleep(1)\n"
        f"    pathlib.Path({str(tmp_path / 'saved')!r}).touch()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(f"import subprocess, sys; subprocess.run([sys.executable, {str(training)!r}])")
    process = start(program)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


def test_program_ends_when_the_launcher_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    process = start(program)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait(timeout=10)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the program outlived its launcher"
        time.sleep(0.05)


def test_devices_of_two_jobs_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with lock_devices(1, folder=tmp_path) as first, lock_devices(2, folder=tmp_path) as second:
        assert first == ["3"]
        assert second == ["5", "6"]
    with lock_devices(3, folder=tmp_path) as again:
        assert again == ["3", "5", "6"]


def test_job_waits_for_a_busy_device(tmp_path: Path) -> None:
    """Two launchers, one device: the second starts when the first has ended."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'], time.time()); time.sleep(1); print(time.time())"
    )
    variables = {"CUDA_VISIBLE_DEVICES": "4", "TMPDIR": str(tmp_path)}
    jobs = [start(program, "--gpus", "1", **variables) for _ in range(2)]
    times = []
    for job in jobs:
        words = [word for word in job.communicate(timeout=60)[0].split() if word.replace(".", "").isdigit()]
        numbers = [float(word) for word in words if len(word) > 8]
        assert job.returncode == 0 and "4" in words
        times.append(numbers)
    first, second = sorted(times)
    assert first[1] <= second[0]


def test_too_few_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with (
        pytest.raises(UserError, match=r"2 GPU\(s\) asked for, 1 found"),
        lock_devices(2, folder=tmp_path),
    ):
        pass


def test_slurm_has_placed_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with lock_devices(1, folder=tmp_path) as first, lock_devices(1, folder=tmp_path) as second:
        assert first == second == ["0"]


@pytest.mark.parametrize(
    ("named", "expected"),
    [("0,2", ["0", "2"]), ("", []), ("-1", []), ("1,-1,2", ["1"]), ("GPU-ab, GPU-cd", ["GPU-ab", "GPU-cd"])],
)
def test_visible_devices_as_cuda_reads_them(named: str, expected: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": named}) == expected


def test_ports() -> None:
    assert choose_port(0) > 0
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot be used"):
            choose_port(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("CODE_VERSION = 3\n", 3),
        ("import x\nCODE_VERSION: int = 12  # raised\n", 12),
        ("# CODE_VERSION = 5\n", 0),
        ("    CODE_VERSION = 5\n", 0),
        ("", 0),
    ],
)
def test_code_version_is_read_from_the_text(tmp_path: Path, text: str, version: int) -> None:
    program = tmp_path / "p.py"
    program.write_text(text)
    assert code_version(program) == version


def test_every_stage_has_a_code_version(repository: Path) -> None:
    from odb_workflow.workflow.places import PROGRAMS

    scripts = repository / "workflow_scripts"
    without_results = {"inspect", "prefetch"}
    stages = {stage: name for stage, name in PROGRAMS.items() if stage not in without_results}
    assert {stage for stage, name in stages.items() if code_version(scripts / name) < 1} == set()
