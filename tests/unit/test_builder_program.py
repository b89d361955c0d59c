"""Running a builder's program: arguments, package, requirements, the contract, and builds that break off."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.builders.program import BUILT_MARKER, check_contract

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "workflow_scripts" / "build_tmdb.py"

BUILDER = """
import argparse, json, pathlib, sys
{imports}
parser = argparse.ArgumentParser()
parser.add_argument("--output", type=pathlib.Path)
parser.add_argument("--overwrite", action="store_true")
options, further = parser.parse_known_args()
assert options.overwrite
options.output.mkdir(parents=True, exist_ok=True)
{body}
"""
GOOD = """
rows = ['{"id": "a", "note": "one \\u2028 line"}', '{"id": "b"}']
(options.output / "records.jsonl").write_text("\\n".join(rows), encoding="utf-8")
(options.output / "metadata.json").write_text(json.dumps({"num_records": 2, "arguments": further}))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A builder repository with its own package, written by the test."""
    folder = tmp_path / "deps" / "builder"
    write_builder(folder, GOOD)
    return folder


def write_builder(folder: Path, body: str, imports: str = "", requires: str = "[]") -> None:
    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    (folder / "made_up_mix").mkdir(exist_ok=True)
    (folder / "made_up_mix" / "__init__.py").write_text("NAME = 'made up'\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "made-up-mix"\nversion = "1"\ndependencies = {requires}\n'
        '[tool.setuptools]\npackages = ["made_up_mix"]\n'
    )
    text = BUILDER.replace("{imports}", imports).replace("{body}", body)
    (folder / "scripts" / "build_public_mm_mix.py").write_text(text)


def build(
    checkout: Path, output: Path, *arguments: str, kind: str = "git"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--kind", kind, "--checkout", str(checkout)]
    return subprocess.run([*command, "--output", str(output), *arguments], capture_output=True, text=True)


def test_the_package_is_installed_beside_the_checkout_and_arguments_are_forwarded(
    checkout: Path, tmp_path: Path
) -> None:
    body = GOOD + 'print("package at", made_up_mix.__file__)\n'
    write_builder(checkout, body, imports="import made_up_mix")
    output = tmp_path / "data" / "tmdb"
    done = build(
        checkout, output, "--builder-args", '["--subset", "a b", "--fast"]', "--sizes", '{"total": 9}'
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((output / "metadata.json").read_text())["arguments"] == [
        "--sizes",
        "9",
        "--subset",
        "a b",
        "--fast",
    ]
    # installed beside it, or used from the checkout where pip or its build tool is missing
    assert "package at" in done.stdout and str(checkout.parent) in done.stdout
    missing = subprocess.run([sys.executable, "-c", "import made_up_mix"], capture_output=True)
    assert missing.returncode != 0, "the environment of the workflow is as it was"
    assert sorted(path.name for path in output.parent.iterdir() if not path.name.endswith(".build")) == [
        "tmdb"
    ]


def test_missing_requirements_are_listed_before_the_build(checkout: Path, tmp_path: Path) -> None:
    requires = '["numpy", "no-such-package-here>=2", "pillow<2", "windows-only; sys_platform == \'win32\'"]'
    write_builder(checkout, GOOD, requires=requires)
    done = build(checkout, tmp_path / "tmdb")
    if "used from its checkout" in done.stderr:  # no build tool: requirements cannot be read
        pytest.fail("this environment cannot install a package: " + done.stderr)
    assert done.returncode == 1
    assert "no-such-package-here>=2 (here: missing)" in done.stderr
    assert "pillow<2 (here: " in done.stderr
    assert "numpy" not in done.stderr and "windows-only" not in done.stderr
    assert "pip install 'no-such-package-here>=2'" in done.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('cannot download set X')", "cannot download set X"),
        ("sys.exit(3)", "ended with status 3:\n(it printed nothing)"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by signal 9 (often because memory ran out)"),
        ("import no_such_module_here", "install what the builder needs"),
        ("raise OSError(28, 'No space left on device')", "free space"),
        ("pass", "wrote no metadata.json"),
        (GOOD.replace('"num_records": 2', '"num_records": 3'), "says num_records 3, records.jsonl has 2"),
        (GOOD.replace("rows = ", "rows = []; unused = "), "the TMDB is empty"),
        (GOOD + '(options.output / "metadata.json").write_text("[]")', "holds no object"),
        (GOOD + '(options.output / "metadata.json").write_text("{")', "not a readable JSON file"),
    ],
)
def test_a_build_that_fails_says_why_and_leaves_the_old_data(
    checkout: Path, tmp_path: Path, body: str, message: str
) -> None:
    output = tmp_path / "tmdb"
    output.mkdir()
    (output / "metadata.json").write_text('{"old": true}')
    (output / BUILT_MARKER).touch()
    write_builder(checkout, body)
    done = build(checkout, output, kind="embedded")
    assert done.returncode == 1 and message in done.stderr and "error:" in done.stderr
    assert json.loads((output / "metadata.json").read_text()) == {"old": True}
    assert not list(tmp_path.glob(".tmdb.*.part"))
    assert ".part" not in done.stderr.partition("error:")[2]


@pytest.mark.parametrize("target_exists", [True, False])
def test_a_linked_folder_stays_a_link(checkout: Path, tmp_path: Path, target_exists: bool) -> None:
    disk = tmp_path / "large_disk"
    disk.mkdir()
    link = tmp_path / "tmdb"
    link.symlink_to(disk / "data")
    if target_exists:
        (disk / "data").mkdir()
    for _ in range(2):
        done = build(checkout, link, kind="embedded")
        assert done.returncode == 0, done.stderr
        assert f"2 records in {link}\n" in done.stdout
        assert link.is_symlink() and not (disk / "data").is_symlink()
        assert json.loads((disk / "data" / "metadata.json").read_text())["num_records"] == 2
    assert not list(tmp_path.glob(".tmdb.*")) and not list(disk.glob(".data.*.part"))


def test_faults_of_a_build_name_the_folder_that_the_user_knows(checkout: Path, tmp_path: Path) -> None:
    output = tmp_path / "tmdb"
    write_builder(checkout, "pass")
    done = build(checkout, output, kind="embedded")
    assert f"where: {output} (the new build, removed; what stood there is unchanged)" in done.stderr
    write_builder(checkout, GOOD + '(options.output / "metadata.json").write_text("[]")')
    done = build(checkout, output, kind="embedded")
    assert f"where: {output / 'metadata.json'} (the new build, removed; " in done.stderr


def test_output_that_is_not_utf8_does_not_end_a_build(checkout: Path, tmp_path: Path) -> None:
    write_builder(checkout, GOOD + 'sys.stdout.buffer.write(b"100 \\xff\\xfe\\n")')
    done = build(checkout, tmp_path / "tmdb", kind="embedded")
    assert done.returncode == 0, done.stderr
    assert "100 \ufffd\ufffd\n" in done.stdout


def test_a_folder_of_somebody_else_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    output = tmp_path / "mine"
    output.mkdir()
    (output / "thesis.txt").write_text("important")
    done = build(checkout, output, kind="embedded")
    assert done.returncode == 1 and "a build would delete" in done.stderr
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    (output / "thesis.txt").unlink()
    for _ in range(2):  # an empty folder is filled, and an own build is built again
        assert build(checkout, output, kind="embedded").returncode == 0
        assert json.loads((output / "metadata.json").read_text())["num_records"] == 2


def test_killed_builds_leave_nothing_finished_and_the_next_one_cleans_up(
    checkout: Path, tmp_path: Path
) -> None:
    output = tmp_path / "tmdb"
    write_builder(checkout, GOOD + "import time; print('sleeping', flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [
            sys.executable,
            str(PROGRAM),
            "--kind",
            "embedded",
            "--checkout",
            str(checkout),
            "--output",
            str(output),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    deadline = time.monotonic() + 60
    while "sleeping" not in process.stdout.readline():
        assert time.monotonic() < deadline
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait(timeout=30)
    for child in children:
        subprocess.run(["kill", "-9", child], check=False)
    process.stdout.close()
    assert not output.exists() and list(tmp_path.glob(".tmdb.*.part"))
    write_builder(checkout, GOOD)
    assert build(checkout, output, kind="embedded").returncode == 0
    assert not list(tmp_path.glob(".tmdb.*.part"))


def test_terminated_by_the_workflow_the_builder_ends_too(checkout: Path, tmp_path: Path) -> None:
    write_builder(
        checkout,
        "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)",
    )
    process = subprocess.Popen(
        [
            *(sys.executable, str(PROGRAM), "--kind", "embedded", "--checkout", str(checkout)),
            *("--output", str(tmp_path / "tmdb")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("pid"):
        pass
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=30)
    process.stdout.close()
    time.sleep(0.3)
    assert not Path(f"/proc/{line.split()[1]}").exists()
    assert not (tmp_path / "tmdb").exists() and not list(tmp_path.glob(".tmdb.*.part"))


def test_lines_are_counted_at_line_feeds_only(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"v": "a\u2028b\u0085c\u2029"}\n\n{"v": 2}', encoding="utf-8")
    (tmp_path / "metadata.json").write_text('{"num_records": 2}')
    assert check_contract(tmp_path) == {"num_records": 2}


def test_the_embedded_builder_through_the_program(tmp_path: Path) -> None:
    output = tmp_path / "tmdb"
    done = build(ROOT / "dataset_builder", output, "--seed", "3", "--sizes", '{"total": 20}', kind="embedded")
    assert done.returncode == 0, done.stderr
    assert json.loads((output / "metadata.json").read_text())["num_records"] == 20


def test_no_checkout_no_program(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no scripts/build_public_mm_mix\.py"):
        from odb_workflow.tmdb.builders.program import run_builder_program

        run_builder_program(tmp_path, tmp_path / "out", [], False)
