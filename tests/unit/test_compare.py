"""The program compare.py from the command line: outputs, strict JSON, exit status."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare
import comparison_results as made
import pytest
from odb_workflow.runtime.errors import UserError

CONFIG = """\
run: demo
arms:
  odb: {loader: odb}
  standard: {loader: standard}
seeds: []
report: {level: 0.95}
"""


def arguments(root: Path, output: Path, arms: str, *extra: str) -> list[str]:
    """Arguments of compare.py; writes the merged config beside ``output``."""
    config = output.parent / "merged.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG)
    return [
        "--arms-root", str(root), "--arms", arms, "--reference-arm", "standard",
        "--config", str(config), "--output-dir", str(output), *extra,
    ]  # fmt: skip


def run_here(monkeypatch: pytest.MonkeyPatch, root: Path, output: Path, arms: str, *extra: str) -> int:
    """Run compare.py's main in this process; importing SciPy and Matplotlib anew takes seconds."""
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments(root, output, arms, *extra)])
    return compare.main()


def strict(path: Path) -> dict:
    """Parse JSON and refuse NaN and infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {path}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, float]:
    """A complete comparison by the program: folder, finished process, seconds of CPU time."""
    base = tmp_path_factory.mktemp("complete")
    root, output = made.write_run(base / "outputs" / "demo"), base / "results" / "demo"
    program = [sys.executable, str(repository / "workflow_scripts" / "compare.py")]
    before = os.times()
    done = subprocess.run(
        [*program, *arguments(root, output, "odb,standard,standard_1,untrained")],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = os.times()
    used = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    return output, done, used


def test_complete_comparison(finished: tuple) -> None:
    output, done, seconds = finished
    assert done.returncode == 0, done.stderr
    assert seconds < 15
    names = {path.name for path in output.iterdir()}
    assert {"comparison.json", "comparison.csv", "comparison.md", "comparison.html", "figures"} <= names
    document = strict(output / "comparison.json")
    assert [row["name"] for row in document["arms"]] == ["odb", "standard", "standard_1", "untrained"]
    assert document["problems"] == []
    assert document["fairness"]["same_ids"] is True
    assert document["data"]["rejected_by_source"] == {
        "vqa_like": {"rejected": 3, "reasons": {"over_length": 3}}
    }
    assert document["reproduce"].startswith("./run.sh all --configfile ")
    page = " ".join((output / "comparison.html").read_text().split())
    assert "(3 × over length; vqa_like 3)" in page
    figures = {item["name"] for item in document["figures"]}
    assert len(figures) == 12
    for name in figures:
        assert (output / "figures" / f"{name}.png").stat().st_size > 5000
        assert (output / "figures" / f"{name}.svg").read_text().lstrip().startswith("<?xml")


def test_derived_numbers(finished: tuple) -> None:
    document = strict(finished[0] / "comparison.json")
    rows = {row["name"]: row["metrics"] for row in document["arms"]}
    item = next(item for item in document["differences"] if item["arm"] == "odb")
    assert item["speed"]["samples_per_second"]["whole"] == pytest.approx(
        rows["odb"]["samples_per_second"] / rows["standard"]["samples_per_second"]
    )
    delta = rows["odb"]["token_weighted_eval_loss"] - rows["standard"]["token_weighted_eval_loss"]
    assert item["deltas"]["token_weighted_eval_loss"] == pytest.approx(delta)
    assert item["validation_loss"]["token_weighted"]["value"] == pytest.approx(delta, rel=1e-6)
    test = item["mmmu"]["mcnemar"]
    gap = (test["only_candidate"] - test["only_reference"]) / test["n"]
    assert item["deltas"]["mmmu_accuracy"] == pytest.approx(gap)
    assert item["mmmu"]["difference"]["value"] == pytest.approx(gap)
    learned = document["arms"][0]["learning"]
    assert learned["loss_reduction"]["eval_loss"] > 0.5
    assert learned["mmmu_chance"] == pytest.approx(0.25) and learned["mmmu_above_chance_p"] < 0.01


def test_the_answer_holds_every_other_arm(finished: tuple) -> None:
    """A gain over one reference alone would mislead: each other arm is named with its batches."""
    document = strict(finished[0] / "comparison.json")
    speeds = {row["name"]: row["metrics"]["samples_per_second"] for row in document["arms"]}
    odb = next(answer for answer in document["answers"] if answer["arm"] == "odb")
    ratio = speeds["odb"] / speeds["standard_1"]
    assert odb["against_others"] == (
        f"samples/s over the whole training: {ratio:.2f} times standard_1 (standard, batch 1, pad)"
    )
    assert "time waiting for data" in odb["from_where"]


def test_csv_has_measured_and_published_rows(finished: tuple) -> None:
    output = finished[0]
    table = list(csv.DictReader(io.StringIO((output / "comparison.csv").read_text())))
    rows = {row["arm"]: row for row in table}
    document = strict(output / "comparison.json")
    assert float(rows["odb"]["train_loss"]) == document["arms"][0]["metrics"]["train_loss"]
    assert rows["untrained"]["train_loss"] == ""
    published = rows["Accelerate (ODB)"]
    assert (published["samples_per_second"], published["eval_loss"]) == ("92.23", "1.0744")
    assert published["origin"] == "published, not measured here"
    assert sum(row["origin"] != "measured" for row in table) == 10


def test_markdown_says_the_same(finished: tuple) -> None:
    output = finished[0]
    text = (output / "comparison.md").read_text()
    document = strict(output / "comparison.json")
    assert document["answers"][0]["faster"] in text
    assert document["answers"][0]["against_others"] in text
    assert f"{document['arms'][0]['metrics']['train_loss']:.4f}" in text
    assert "not comparable with leaderboards" in text
    assert "loader `length_grouped`" in text and "batching-study" in text


def test_missing_arm_and_nan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = made.write_run(tmp_path / "outputs" / "demo")
    path = root / "odb" / "train_summary_odb.json"
    summary = json.loads(path.read_text())
    path.write_text(
        json.dumps(summary | {"train_loss": float("nan"), "real_tokens_per_second": float("inf")})
    )
    output = tmp_path / "results" / "demo"
    assert run_here(monkeypatch, root, output, "odb,standard,token_budget") == 3
    document = strict(output / "comparison.json")
    assert document["arms"][0]["metrics"]["train_loss"] is None
    kinds = {(problem["arm"], problem["what"], problem["kind"]) for problem in document["problems"]}
    assert ("odb", "train_loss", "not finite") in kinds
    assert ("odb", "real_tokens_per_second", "not finite") in kinds
    assert document["left_out"]["missing_arms"][0]["arm"] == "token_budget"
    page = (output / "comparison.html").read_text()
    assert "not finite" in page and "has not been run" in page


def test_exit_status() -> None:
    """A missing arm alone is no failure for the report of what is there; a NaN stays one."""
    missing, infinite = {"kind": "missing"}, {"kind": "not finite"}
    assert compare.exit_status([], False) == 0
    assert compare.exit_status([missing], False) == 3
    assert compare.exit_status([missing], True) == 0
    assert compare.exit_status([missing, infinite], True) == 3


def test_nothing_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A report before anything ran is a page that says so."""
    output = tmp_path / "results" / "none"
    assert run_here(monkeypatch, tmp_path / "outputs" / "none", output, "odb,standard") == 3
    assert "Nothing to compare yet" in (output / "comparison.html").read_text()
    assert strict(output / "comparison.json")["differences"] == []


@pytest.mark.parametrize(
    ("arms", "extra", "message"),
    [
        ("odb,other", (), "'standard' is not among the arms: odb, other"),
        ("odb,odb", (), "distinct"),
        ("odb,standard", ("--level", "95"), "level"),
        ("odb,standard", ("--config", "absent.yaml"), "file not found"),
    ],
)
def test_wrong_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arms: str, extra: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_here(monkeypatch, tmp_path / "outputs", tmp_path / "r" / "x", arms, *extra)
    assert not (tmp_path / "r" / "x" / "comparison.json").exists()
