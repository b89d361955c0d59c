"""Files appear whole or not at all; errors reach the user without a traceback; one writer per folder."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from odb_workflow.runtime import files
from odb_workflow.runtime.errors import UserError, run_main
from odb_workflow.runtime.lock import folder_lock
from odb_workflow.runtime.provenance import without_home


def test_atomic_write_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    files.atomic_write_json(target, {"value": 1})
    with pytest.raises(RuntimeError), files.atomic_open(target) as handle:
        handle.write("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"value": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_atomic_directory_replaces_or_leaves(tmp_path: Path) -> None:
    target = tmp_path / "d"
    with files.atomic_directory(target) as folder:
        (folder / "x").write_text("1")
    with pytest.raises(RuntimeError), files.atomic_directory(target) as folder:
        (folder / "y").write_text("2")
        raise RuntimeError
    assert [path.name for path in target.iterdir()] == ["x"]
    with files.atomic_directory(target) as folder:
        (folder / "z").write_text("3")
    assert [path.name for path in target.iterdir()] == ["z"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_json_never_holds_nan(tmp_path: Path) -> None:
    files.atomic_write_json(tmp_path / "n.json", {"loss": math.nan, "list": [math.inf, 1.5]})
    assert json.loads((tmp_path / "n.json").read_text()) == {"loss": None, "list": [None, 1.5]}


def test_lines_split_at_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes('{"a": "x\u2028y\u0085z"}\r\n{"a": "last"}'.encode())
    assert files.read_jsonl(path) == [{"a": "x\u2028y\u0085z"}, {"a": "last"}]


def test_read_json_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.json"):
        files.read_json(tmp_path / "missing.json")


def test_folder_lock_refuses_a_second_holder_and_names_the_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from odb_workflow.runtime.lock import folder_lock\n"
        "from odb_workflow.runtime.errors import run_main\n"
        "def main():\n    with folder_lock(sys.argv[1], 'training'): pass\n"
        "run_main(main)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {"PYTHONPATH": str(Path(files.__file__).parents[2])}
    with folder_lock(tmp_path, "training"):
        refused = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert refused.returncode == 1
    assert str(tmp_path) in refused.stderr and "Traceback" not in refused.stderr
    assert subprocess.run(command, env=environment).returncode == 0


def test_home_and_working_folder_never_appear(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    assert without_home(f"/home/someone/x {tmp_path}/y") == "~/x ./y"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("what"), 1, "error: what\n"),
        (OSError(28, "No space left on device", "/some/file"), 1, "  where: /some/file\n  fix:   free space"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device\n  fix:   free space"),
        (OSError(30, "Read-only file system", "/some/file"), 1, "choose a folder that can be written"),
        (OSError(24, "Too many open files"), 1, "ulimit -n"),
        (OSError(5, "Input/output error"), 2, ""),
        (ValueError("a fault of ours"), 2, ""),
    ],
)
def test_how_a_program_ends(
    error: Exception, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            run_main(main)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == status
    assert message in capsys.readouterr().err
