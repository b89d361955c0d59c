"""Several ranks train as one process would: gradients, steps, each sample once, one learning-rate curve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import rank_checks
import torch
from train_runs import PROGRAM, TrainingInput, fork_ranks, trained

pytestmark = pytest.mark.distributed

REPOSITORY = PROGRAM.parent.parent
STEPS = [f"{loader}-{accumulation}" for loader in ("standard", "odb") for accumulation in (1, 2)]
MIXED = ["mixed-frozen", "mixed-trained", "text-trained"]


def checks(given: TrainingInput, folder: Path, ranks: int, deepspeed: str = "") -> dict[str, Any]:
    """The numbers that ``rank_checks.py`` measures on so many ranks."""
    out = folder / "checks.json"
    places = {"--model": given.model, "--data": given.data, "--validation": given.validation, "--out": out}
    argv = [str(part) for pair in places.items() for part in pair]
    argv += ["--deepspeed", deepspeed] if deepspeed else []
    run = fork_ranks(rank_checks.main, argv, folder / "checks", ranks, {}).wait()
    assert set(run.statuses) == {0}, run.log[-5000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def two_ranks(given: TrainingInput, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return checks(given, tmp_path_factory.mktemp("two"), 2)


def assert_like_one_process(results: dict[str, Any], ranks: int) -> None:
    assert results["world_size"] == ranks
    for name in STEPS + MIXED:
        result = results[name]
        assert result["gradient"] < 1e-5, (name, result)
        assert result["norm"] < 1e-5, (name, result)
        assert result["norm_value"] > 0.5, "the step must be one that is clipped"
        assert result["weights"] < 1e-5, (name, result)
        assert result["samples"] >= ranks


def test_two_ranks_compute_the_gradient_of_one(two_ranks: dict[str, Any]) -> None:
    """Both loaders, accumulation, text and images on different ranks, vision tower frozen and trained."""
    assert_like_one_process(two_ranks, 2)


def test_three_ranks_compute_the_gradient_of_one(given: TrainingInput, tmp_path: Path) -> None:
    assert_like_one_process(checks(given, tmp_path, 3), 3)


@pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="DeepSpeed on CPU needs a C++ compiler"
)
def test_zero_2_computes_the_gradient_of_one(given: TrainingInput, tmp_path: Path) -> None:
    """The same step, gradient norm and clipping as without DeepSpeed."""
    results = checks(given, tmp_path, 2, str(REPOSITORY / "config" / "ds_z2.json"))
    assert_like_one_process(results, 2)
    assert_unequal_ranks_stopped(results)


def test_ranks_that_do_not_belong_together_stop_within_seconds(two_ranks: dict[str, Any]) -> None:
    assert_unequal_ranks_stopped(two_ranks)


def assert_unequal_ranks_stopped(two_ranks: dict[str, Any]) -> None:
    """Uneven steps, a failed loader, unequal settings, a loss that is no number: all ranks end."""
    for name in ("uneven", "failed", "config", "nan"):
        assert all(said["error"] for said in two_ranks[name]), name
        assert all(said["seconds"] < 5 for said in two_ranks[name]), name
    uneven = {said["error"] for said in two_ranks["uneven"]}
    assert len(uneven) == 1
    assert "rank 0: 1, rank 1: 0" in uneven.pop()
    other, own = (said["error"] for said in two_ranks["failed"])
    assert "rank 1 could not load its batch" in other
    assert own == "the disk is gone"
    assert "lr: rank 0: 0.001, rank 1: 0.002" in two_ranks["config"][0]["error"]
    for said in two_ranks["nan"]:  # the loss was not a number on rank 1 only
        assert "the loss of step 1 is nan" in said["error"]
        assert two_ranks["nan_name"][1] in said["error"]
        assert two_ranks["nan_name"][0] not in said["error"]


ODB = "--loader odb --token-budget 700 --buffer-size 24 --no-warmup-buffer --prefetch-factor 24 --epochs 2.5"
STANDARD = "--loader standard --fixed-batch-size 3 --epochs 2 --gradient-accumulation-steps 2"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_sample_once_per_epoch(given: TrainingInput, tmp_path: Path, ranks: int) -> None:
    """54 training samples of 60 records; 2.5 epochs emit 54 + 54 + 27."""
    scaling = {1: "none", 2: "exact", 3: "approx"}[ranks]
    run = trained(given, tmp_path / "odb", f"{ODB} --loss-scaling {scaling}", ranks)
    audit = run.summary["samples_audit"]
    assert [epoch["expected"] for epoch in audit["epochs"]] == [54, 54, 27]
    assert (audit["expected"], audit["distinct"], audit["lost"], audit["doubled"]) == (135, 135, 0, 0)
    assert audit["complete"]
    assert audit["padding_duplicates"] == sum(-n % ranks for n in (54, 54, 27))
    assert run.summary["emitted_samples"] == 135 + audit["padding_duplicates"]
    assert run.summary["emitted_samples"] == sum(step["samples"] for step in run.steps)
    assert run.summary["world_size"] == ranks
    assert run.log.count("INFO odb: ") == 1


def test_runs_of_standard(given: TrainingInput, tmp_path: Path) -> None:
    """Same seed, same weights; one learning-rate curve; a saved model that plain transformers loads."""
    first = trained(given, tmp_path / "one" / "standard", STANDARD)
    again = trained(given, tmp_path / "two" / "standard", STANDARD)
    weights = [(run.out / "checkpoint" / "model.safetensors").read_bytes() for run in (first, again)]
    assert weights[0] == weights[1]
    assert first.summary["samples_audit"]["ids_sha256"] == again.summary["samples_audit"]["ids_sha256"]
    assert [step["loss"] for step in first.steps] == [step["loss"] for step in again.steps]

    ranks = trained(given, tmp_path / "three" / "standard", STANDARD, ranks=2)
    assert [len(first.steps), len(ranks.steps)] == [18, 10]
    from odb_workflow.training.schedule import Schedule

    schedule = Schedule(1e-3, 0.03, "cosine", total=108)
    for run in (first, ranks):
        done = 0
        for step in run.steps:
            assert step["lr"] == schedule.rate((done + step["samples"] / 2) / 108)
            done += step["samples"]
        assert done == 108
    assert (
        ranks.summary["samples_audit"]["epochs"][0]["set_sha256"]
        == (first.summary["samples_audit"]["epochs"][0]["set_sha256"])
    )

    assert_loads_in_plain_transformers(given, first.out)


def assert_loads_in_plain_transformers(given: TrainingInput, out: Path) -> None:
    """The record names every file; the loaded model gives the loss of our own forward on the same weights."""
    from odb_workflow.loaders.collate import Collator
    from odb_workflow.model.forward import build_forward
    from odb_workflow.processing.sample import SampleProcessor
    from odb_workflow.runtime.files import sha256_file
    from odb_workflow.tmdb.store import RecordStore
    from transformers import AutoModelForImageTextToText, AutoProcessor

    record = json.loads((out / "checkpoint.json").read_text())
    assert record["saved"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file["path"] for file in record["files"]
    }
    for file in record["files"]:
        assert sha256_file(out / "checkpoint" / file["path"]) == file["sha256"]
    model = AutoModelForImageTextToText.from_pretrained(out / "checkpoint", dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.model.language_model.embed_tokens.weight.data_ptr()
    processor = AutoProcessor.from_pretrained(out / "checkpoint")
    store = RecordStore(given.data)
    sample = SampleProcessor(processor, 4096, given.data)(store[3], 3)
    inputs = {
        key: sample[key][None] for key in ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
    } | {key: sample[key] for key in ("pixel_values", "image_grid_thw") if key in sample}
    with torch.no_grad():
        theirs = float(model(**inputs).loss)
    batch = Collator.from_config(model.config, processor.tokenizer.pad_token_id)([sample])
    with torch.no_grad():
        ours = build_forward(model, "auto", "cpu", training=False)(batch)
    assert float(ours) / int(batch["label_counts"].sum()) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    "flags", ["--loader length_grouped --fixed-batch-size 4", "--loader token_budget --padding pack"]
)
def test_the_other_loaders_train_on_two_ranks(given: TrainingInput, tmp_path: Path, flags: str) -> None:
    run = trained(given, tmp_path / "arm", f"{flags} --token-budget 700 --save-final-model 0", ranks=2)
    assert run.summary["samples_audit"]["complete"]
    assert run.summary["samples_audit"]["padding_duplicates"] == 0
    assert json.loads((run.out / "checkpoint.json").read_text())["saved"] is False
    assert not (run.out / "checkpoint").exists()
    if "pack" in flags:
        assert run.summary["padded_tokens"] == 0
