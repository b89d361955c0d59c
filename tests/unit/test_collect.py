"""Reading finished results: what is absent is noted with the reason, what is there is read right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import comparison_results as made
import pytest
from odb_workflow.comparison.collect import (
    collect_arm,
    collect_lengths,
    normalize_losses,
    normalize_predictions,
)
from odb_workflow.comparison.differences import difference, paired_runs
from odb_workflow.comparison.fairness import fairness, ids_checksum
from odb_workflow.comparison.rows import arm_row
from odb_workflow.comparison.throughput import (
    steady_estimate,
    steady_ratio,
    time_shares,
    warmup_steps,
    window_rates,
)
from odb_workflow.runtime.errors import UserError


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_run(tmp_path_factory.mktemp("outputs") / "demo")


def edit(path: Path, **changes: object) -> None:
    """Change fields of a JSON file; None takes a field away."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def test_complete_arm(results: Path) -> None:
    row = arm_row(collect_arm(results, "odb"), 0.95)
    assert row["status"] == "complete" and row["problems"] == []
    summary = json.loads((results / "odb" / "train_summary_odb.json").read_text())
    assert row["metrics"]["samples_per_second"] == summary["effective_emitted_samples_per_second"]
    assert row["metrics"]["mmmu_n"] == 240
    assert row["excluded"] == {"answer is no single letter A-H": 1}


def test_missing_arm_says_why(results: Path) -> None:
    arm = collect_arm(results, "length_grouped")
    row = arm_row(arm, 0.95)
    assert row["status"] == "missing"
    assert [problem["kind"] for problem in row["problems"]] == ["missing"]
    assert "has not been run" in row["problems"][0]["reason"]
    assert row["problems"][0]["path"].endswith("length_grouped")
    assert set(row["metrics"].values()) == {None}


def test_untrained_has_no_training_metrics_by_design(results: Path) -> None:
    row = arm_row(collect_arm(results, "untrained"), 0.95)
    assert row["status"] == "complete"
    assert "runtime_seconds" in row["not_applicable"] and "eval_loss" not in row["not_applicable"]


def test_null_and_nan_are_not_finite_and_absent_is_missing(tmp_path: Path) -> None:
    root = made.write_run(tmp_path / "run")
    edit(root / "odb" / "train_summary_odb.json", train_loss=math.nan, padding_ratio=None)
    path = root / "odb" / made_valloss() / "eval_results.json"
    path.write_text(path.read_text().replace('"eval_loss": 1', '"eval_loss": null, "x": 1', 1))
    row = arm_row(collect_arm(root, "odb"), 0.95)
    found = {(problem["what"], problem["kind"]) for problem in row["problems"]}
    assert {("train_loss", "not finite"), ("padding_ratio", "missing"), ("eval_loss", "not finite")} <= found
    assert row["status"] == "partial"


def made_valloss() -> str:
    return "eval_out_accelerate_valloss"


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    root = made.write_run(tmp_path / "run")
    (root / "odb" / "train_summary_odb.json").write_text("{broken")
    (root / "standard" / made_valloss() / "eval_results.json").write_text("[1]")
    notes = collect_arm(root, "odb").notes
    assert "not readable" in notes[0].reason and notes[0].path.endswith("train_summary_odb.json")
    assert collect_arm(root, "standard").notes[0].reason == "not a JSON object"


def test_a_number_that_its_rows_contradict_is_a_problem(tmp_path: Path) -> None:
    root = made.write_run(tmp_path / "run")
    edit(root / "odb" / "mmmu_mc_likelihood_accelerate" / "mmmu_mc_likelihood_results.json", accuracy=0.9)
    problems = arm_row(collect_arm(root, "odb"), 0.95)["problems"]
    assert [(problem["what"], problem["kind"]) for problem in problems] == [
        ("mmmu_accuracy", "contradiction")
    ]


def test_doubled_row_is_refused(tmp_path: Path) -> None:
    root = made.write_run(tmp_path / "run")
    path = root / "odb" / made_valloss() / "per_sample_losses.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[3]]) + "\n")
    arm = collect_arm(root, "odb")
    assert arm.runs[0].losses is None
    assert arm.notes[0].reason.startswith("val-3 stands twice")


def test_rows_without_the_needed_fields() -> None:
    with pytest.raises(UserError, match="label_tokens"):
        normalize_losses([{"id": "a", "loss": 1.0}])
    with pytest.raises(UserError, match="correct"):
        normalize_predictions([{"id": "a", "prediction": "A"}])


def test_predictions_know_chance_and_correctness() -> None:
    table = normalize_predictions(
        [
            {"subject": "Art", "ground_truth": "B", "prediction": "B", "valid_candidate_letters": ["A", "B"]}
            | {"id": "1"},
            {"subject": "Math", "ground_truth": "A", "prediction": "C", "valid_candidate_letters": [*"ABCD"]}
            | {"id": "1"},
        ]
    )  # fmt: skip
    assert table["correct"].tolist() == [True, False]
    assert table["chance"].tolist() == [0.5, 0.25]
    assert table["key"].is_unique, "the same id in two subjects is two questions"


def test_lengths(results: Path, tmp_path: Path) -> None:
    lengths = collect_lengths(results)
    assert lengths is not None and len(lengths) == 2000
    assert collect_lengths(tmp_path) is None


def test_seeds_are_paired_by_seed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for arm, batch, base in (("odb", None, 1.0), ("standard", 8, 1.2)):
        for seed in (1, 2, 3):
            folder = root / arm / f"seed-{seed}"
            made.write_training(folder, arm, loader=arm, batch=batch, speed=9000, seed=seed)
            made.write_evaluations(folder, loss=base + 0.01 * seed, accuracy=0.5, seed=seed)
    made.write_evaluations(root / "untrained", loss=5, accuracy=0.25, seed=1)
    arms = {name: collect_arm(root, name, [1, 2, 3]) for name in ("odb", "standard", "untrained")}
    assert [run.seed for run in arms["odb"].runs] == [1, 2, 3]
    assert [(a.seed, r.seed) for a, r in paired_runs(arms["odb"], arms["standard"])] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    assert [(a.seed, r.seed) for a, r in paired_runs(arms["untrained"], arms["standard"])] == [(None, 1)]
    rows = {name: arm_row(arm, 0.95) for name, arm in arms.items()}
    values = [one["metrics"]["eval_loss"] for one in rows["odb"]["seeds"]]
    assert rows["odb"]["metrics"]["eval_loss"] == pytest.approx(sum(values) / 3)
    low, high = rows["odb"]["intervals"]["eval_loss"]
    assert low < min(values) and high > max(values), "three close seeds: Student's t is wider than the range"
    block = difference(arms["odb"], arms["standard"], rows["odb"], rows["standard"], 0.95)
    assert block["validation_loss"]["mean"]["method"] == "Student t"
    assert block["validation_loss"]["mean"]["n"] == 3
    assert block["speed"]["samples_per_second"]["over"].startswith("3 training seeds")
    assert len(block["mmmu"]["mcnemar_per_seed"]) == 3
    # A seed that the config names but nobody trained is missing, not left out.
    assert arm_row(collect_arm(root, "odb", [1, 2, 3, 4]), 0.95)["status"] == "partial"


def test_windows_and_warm_up(results: Path) -> None:
    run = collect_arm(results, "standard").runs[0]
    assert run.steps is not None and run.summary is not None
    start = warmup_steps(run.steps)
    assert start == 25, "2,000 samples in batches of 8: the first tenth is 25 steps"
    rates = window_rates(run.steps)
    assert rates is not None
    assert rates["warmup"]["steps"] + rates["steady"]["steps"] == len(run.steps)
    assert len(rates["windows"]["samples_per_second"]) == 10
    estimate = steady_estimate(rates, "samples_per_second")
    assert estimate is not None and estimate.value == rates["steady"]["samples_per_second"]
    assert min(rates["windows"]["samples_per_second"]) < estimate.value
    same = steady_ratio(rates, rates, "real_tokens_per_second")
    assert same is not None and same.value == 1 and not same.excludes(1)
    seconds = rates["warmup"]["seconds"] + rates["steady"]["seconds"]
    assert seconds == pytest.approx(run.steps["elapsed_seconds"].iloc[-1])
    steady = 8 * rates["steady"]["steps"] / rates["steady"]["seconds"]
    assert rates["steady"]["samples_per_second"] == pytest.approx(steady)
    shares = time_shares(run.summary, run.steps)
    assert shares is not None
    assert sum(shares.values()) == pytest.approx(run.summary["runtime_seconds"], rel=1e-6)
    assert window_rates(run.steps.head(1)) is None
    few = window_rates(run.steps.head(6))
    assert few is not None and few["windows"]["samples_per_second"] == []


def test_fairness_warns_of_what_is_not_batching(tmp_path: Path) -> None:
    root = tmp_path / "run"
    made.write_training(root / "standard", "standard", loader="standard", batch=8, speed=7000)
    made.write_training(
        root / "odb", "odb", loader="odb", batch=None, speed=9000, precision="bf16",
        versions={"torch": "2.11.0", "transformers": "5.24.0"}, token_budget=4096,
    )  # fmt: skip
    found = fairness([collect_arm(root, "standard"), collect_arm(root, "odb")], "standard")
    assert found["same_ids"] is True
    text = "\n".join(found["warnings"])
    assert "precision" in text and "versions.torch" in text and '"2.11.0"' not in text
    assert "token_budget" not in text and "loader" not in text and "optimizer_steps" not in text
    assert len(found["warnings"]) == 2
    assert "optimizer steps" in found["notes"][0]


def test_fairness_of_the_samples(tmp_path: Path) -> None:
    root = tmp_path / "run"
    made.write_training(root / "standard", "standard", loader="standard", batch=8, speed=7000)
    audit = {
        "complete": False, "missing": 0, "lost": 3, "doubled": 0,
        "epochs": [{"epoch": 0, "set_sha256": "b" * 64}],
    }  # fmt: skip
    made.write_training(root / "odb", "odb", loader="odb", batch=None, speed=9000, samples_audit=audit)
    arms = [collect_arm(root, "standard"), collect_arm(root, "odb")]
    found = fairness(arms, "standard")
    text = "\n".join(found["warnings"])
    assert found["same_ids"] is False
    assert "trained on different samples" in text and "odb: 3 training samples lost" in text
    made.write_training(root / "odb", "odb", loader="odb", batch=None, speed=9000, samples_audit={})
    found = fairness([arms[0], collect_arm(root, "odb")], "standard")
    assert found["same_ids"] is None and "not proven" in found["warnings"][0]


def test_id_checksum_does_not_depend_on_the_order_of_training() -> None:
    one = {"ids_sha256": "x", "epochs": [{"ids_sha256": "p", "set_sha256": "s"}]}
    other = {"ids_sha256": "y", "epochs": [{"ids_sha256": "q", "set_sha256": "s"}]}
    assert ids_checksum(one) == ids_checksum(other) is not None
    assert ids_checksum({"ids_sha256": "x"}) is None, "a checksum of the order proves nothing here"
