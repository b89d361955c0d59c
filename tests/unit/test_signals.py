"""SIGTERM of a SLURM job: Snakemake gets it, the program that its rule runs must have it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import odb_workflow
import pytest
from odb_workflow.workflow.signals import pass_on_sigterm

# As Snakemake: sets its own handler later, waits for its rule's shell, which names the launcher in its text.
WAITING = """
import signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from odb_workflow.workflow.signals import pass_on_sigterm
print("passes on:", pass_on_sigterm(), flush=True)
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
shell = f"{sys.executable} {sys.argv[2]}/launch.py | cat; echo shell ended"
print("status", subprocess.run(["bash", "-c", shell]).returncode, flush=True)
"""
LAUNCHER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("launcher told", flush=True)))
print("ready", flush=True)
time.sleep(20)
print("launcher not told", flush=True)
"""


def test_signal_to_snakemake_alone_reaches_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(LAUNCHER)
    package = Path(odb_workflow.__file__).resolve().parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(package), str(tmp_path)],
        env={**os.environ, "SLURM_JOB_ID": "7"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1] == "ready":
            process.send_signal(signal.SIGTERM)  # to this process alone
    assert process.wait(timeout=30) == 0
    assert lines[:2] == ["passes on: True", "ready"]
    assert sorted(lines[2:]) == ["launcher told", "shell ended", "status 0", "told"]


def test_nothing_changes_outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert pass_on_sigterm() is False
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    assert before == -1
