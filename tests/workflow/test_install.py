"""``./run.sh install`` with a stand-in for pip: what it says, what it repeats, how it goes on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import clean_environment

pytestmark = pytest.mark.workflow

# A python3.12 whose `-m venv` makes a .venv whose python logs its pip calls and fails when told to.
PYTHON = """\
#!/bin/bash
if [ "$1" = -m ] && [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    exit
fi
if [ "$1" = -m ] && [ "$2" = pip ]; then
    echo "$*" >> "$PIP_CALLS"
    if [ -n "$PIP_FAILS" ]; then echo "no route to the index" >&2; exit 1; fi
    exit
fi
if [ "$1" = --version ]; then echo "Python 3.12.9"; exit; fi
if [ "$1" = -m ]; then echo "$*"; exit; fi
exec REAL "$@"
"""


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A checkout in a folder with a space, with the stand-in on PATH."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    shutil.copy(repository / "run.sh", folder)
    shutil.copytree(repository / "envs", folder / "envs")
    program = tmp_path / "bin" / "python3.12"
    program.parent.mkdir()
    program.write_text(PYTHON.replace("REAL", sys.executable))
    program.chmod(0o755)
    return folder


def run(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment({"PIP_CALLS": str(checkout / "pip-calls"), **variables})
    environment.pop("PYTHON", None)
    environment["PATH"] = f"{checkout.parent / 'bin'}:{environment['PATH']}"
    return subprocess.run(
        ["bash", str(checkout / "run.sh"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


def pip_calls(checkout: Path) -> list[str]:
    file = checkout / "pip-calls"
    return file.read_text().splitlines() if file.exists() else []


def test_first_call_says_how_long_and_how_much_disk(checkout: Path) -> None:
    done = run(checkout, "install")
    assert done.returncode == 0, done.stdout
    assert "Making .venv with Python 3.12.9 (once: 3 to 10 minutes, about 7 GB on disk)" in done.stdout
    (call,) = pip_calls(checkout)
    assert "envs/constraints.txt" in call and "envs/requirements.txt" in call


def test_second_call_installs_nothing(checkout: Path) -> None:
    run(checkout, "install")
    done = run(checkout, "install")
    assert (done.returncode, done.stdout) == (0, "")
    assert len(pip_calls(checkout)) == 1


def test_interrupted_installation_goes_on(checkout: Path) -> None:
    failed = run(checkout, "install", PIP_FAILS="1")
    assert failed.returncode == 1
    assert "no route to the index" in failed.stdout
    assert "the same command goes on where it stopped" in failed.stdout
    done = run(checkout, "install")
    assert done.returncode == 0
    assert "Completing .venv" in done.stdout and "Making" not in done.stdout


def test_changed_requirements_are_installed(checkout: Path) -> None:
    run(checkout, "install")
    with open(checkout / "envs" / "requirements.txt", "a") as requirements:
        requirements.write("six==1.17.0\n")
    run(checkout, "install")
    assert len(pip_calls(checkout)) == 2


def test_broken_environment_is_made_again(checkout: Path) -> None:
    run(checkout, "install")
    (checkout / ".venv" / "bin" / "python").unlink()
    assert "Making .venv" in run(checkout, "install").stdout


def test_tests_bring_their_own_requirements(checkout: Path) -> None:
    done = run(checkout, "test", "-k", "nothing")
    assert done.returncode == 0, done.stdout
    assert "-m pytest -k nothing" in done.stdout
    assert any("requirements-dev.txt" in call for call in pip_calls(checkout))


def test_no_space(checkout: Path) -> None:
    df = checkout.parent / "bin" / "df"
    df.write_text("#!/bin/sh\necho Filesystem\necho disk 1 1 2000000 1 /\n")
    df.chmod(0o755)
    done = run(checkout, "install")
    assert done.returncode == 1
    assert "2 GB are free" in done.stdout and "needs about 8 GB" in done.stdout
    assert pip_calls(checkout) == []
