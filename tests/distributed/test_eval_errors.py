"""Faults of the input end both evaluations with one clear message; results that stood there stay as they
were.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import eval_benchmark
import eval_valloss
import pytest
import safetensors.torch
import torch
from eval_runs import MMMU_FILES, contents, make_benchmark, make_validation, run
from odb_workflow.runtime.files import read_jsonl
from odb_workflow.runtime.lock import folder_lock

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def validation(tiny_model_dir: Path, tiny_tmdb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_validation(tiny_model_dir, tiny_tmdb, tmp_path_factory.mktemp("validation"))


@pytest.fixture(scope="module")
def benchmark_rows(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_benchmark(repository, tmp_path_factory.mktemp("benchmark"))


@pytest.fixture
def mmmu(tiny_model_dir: Path, benchmark_rows: Path, tmp_path: Path) -> Callable:
    def call(*more: str, checkpoint: Path = tiny_model_dir, status: int = 1, world_size: int = 1) -> str:
        argv = ["--checkpoint", str(checkpoint), "--output-dir", str(tmp_path / "out"), "--device", "cpu"]
        argv += [] if "--dataset" in more else ["--dataset", str(benchmark_rows)]
        log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
        return run(eval_benchmark.main, [*argv, *more], log, world_size, status)

    return call


@pytest.fixture
def valloss(tiny_model_dir: Path, tiny_tmdb: Path, validation: Path, tmp_path: Path) -> Callable:
    def call(*more: str, checkpoint: Path = tiny_model_dir, status: int = 1, world_size: int = 1) -> str:
        argv = ["--checkpoint", str(checkpoint), "--output-dir", str(tmp_path / "out"), "--device", "cpu"]
        argv += ["--data", str(tiny_tmdb), "--validation", str(validation)]
        log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
        return run(eval_valloss.main, [*argv, *more], log, world_size, status)

    return call


@pytest.fixture
def broken_model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint whose training diverged: NaN in the final norm."""
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "diverged"))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("language_model.norm.weight"))
    weights[name] = torch.full_like(weights[name], float("nan"))
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_numbers_that_are_not_finite_name_the_sample_and_leave_old_results(
    mmmu: Callable, valloss: Callable, broken_model: Path, tmp_path: Path
):
    mmmu(status=0)
    before = contents(tmp_path / "out", MMMU_FILES)
    text = mmmu(checkpoint=broken_model)
    assert "not finite" in text and "where: sample validation_Selfmade_" in text
    assert "Traceback" not in text
    assert contents(tmp_path / "out", MMMU_FILES) == before
    text = valloss("--max-samples", "3", checkpoint=broken_model)
    assert "not finite" in text and "where: sample " in text


def test_one_rank_reports_for_all(mmmu: Callable, tmp_path: Path):
    text = mmmu("--subjects", "selfmad", status=1, world_size=2)
    assert "no such subject: 'selfmad' (nearest: Selfmade)" in text
    others = [file.read_text() for file in tmp_path.glob("log-*.1")]
    assert others == [""], "the other rank is silent"


def test_checkpoints_that_are_none(mmmu: Callable, valloss: Callable, tmp_path: Path):
    record = tmp_path / "checkpoint.json"
    record.write_text(json.dumps({"format": 1, "model_dir": "checkpoint", "saved": False}))
    assert "no model was saved by this training" in valloss(checkpoint=record)
    (tmp_path / "empty").mkdir()
    assert "not a checkpoint: it has no config.json" in mmmu(checkpoint=tmp_path / "empty")
    assert not (tmp_path / "out").exists(), "nothing is made before the checkpoint is known"


def test_splits_and_lengths_that_do_not_fit(valloss: Callable):
    text = valloss("--split-mode", "tail", "--val-start", "60")
    assert "val_start is 60" in text
    text = valloss("--max-length", "500")
    assert "--max-length is 500, the dataset was validated with 16384" in text
    text = valloss("--max-samples", "-1", "--prefetch-factor", "0")
    assert "--max-samples is -1" in text and "--prefetch-factor is 0" in text


def test_rows_that_cannot_be_scored_are_listed_or_counted(
    mmmu: Callable,
    benchmark_rows: Path,
    tmp_path: Path,
):
    folder = tmp_path / "rows"
    shutil.copytree(benchmark_rows.parent / "images", folder / "images")
    rows = read_jsonl(benchmark_rows)[:9]
    rows[0]["options"] = "['a', open('/etc/passwd')]"
    rows[1]["image_1"] = "images/gone.png"
    (folder / "images" / "tri.png").write_bytes((folder / "images" / "disc.png").read_bytes()[:60])
    rows[3]["image_3"] = "images/tri.png"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = mmmu("--dataset", str(folder / "rows.jsonl"))
    assert "validation_Selfmade_optimg-0: options are not a literal list" in text
    text = mmmu("--dataset", str(folder / "rows.jsonl"), "--bad-rows", "exclude", status=0)
    results = json.loads((tmp_path / "out" / "mmmu_mc_likelihood_results.json").read_text())
    assert results["excluded_by_reason"] == {
        "broken_image": 1,
        "missing_file": 1,
        "non_letter_answer": 1,
        "options_not_a_literal_list": 1,
    }
    assert results["num_scored"] == 5 and results["total_rows_seen"] == 9


def test_nothing_to_score_is_an_error(mmmu: Callable, benchmark_rows: Path, tmp_path: Path):
    rows = [row | {"answer": "7"} for row in read_jsonl(benchmark_rows)[:3]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "no row can be scored" in mmmu("--dataset", str(tmp_path / "rows.jsonl"))


def test_a_folder_in_use_is_left_alone(mmmu: Callable, tmp_path: Path):
    with folder_lock(tmp_path / "out", "another evaluation"):
        assert "another process is writing here" in mmmu()


def test_a_checkpoint_without_processor_takes_the_base_models_and_says_so(
    valloss: Callable, tiny_model_dir: Path, tmp_path: Path
):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(tiny_model_dir / name, bare / name)
    valloss("--max-samples", "2", status=0)
    expected = (tmp_path / "out" / "per_sample_losses.jsonl").read_bytes()
    text = valloss("--max-samples", "2", checkpoint=bare)
    assert "no base model is known" in text and "--base-model" in text
    text = valloss("--max-samples", "2", "--base-model", str(tiny_model_dir), checkpoint=bare, status=0)
    assert "the processor of" in text
    assert (tmp_path / "out" / "per_sample_losses.jsonl").read_bytes() == expected


def test_the_inline_protocol_has_its_own_name_and_errors(mmmu: Callable, tmp_path: Path):
    text = mmmu("--protocol", "inline")
    assert "8 row(s) cannot be scored" in text
    assert "validation_Selfmade_missing-0: names <image 3>, which the row does not hold" in text
    assert "validation_Selfmade_gold-0: answer E with 2 options only" in text
    mmmu("--protocol", "inline", "--bad-rows", "exclude", status=0)
    results = json.loads((tmp_path / "out" / "mmmu_mc_likelihood_results.json").read_text())
    assert results["protocol"] == "MMMU-MC-choice-likelihood-inline-v1"
    assert results["excluded_by_reason"] == {
        "answer_outside_options": 4,
        "named_image_missing": 4,
        "non_letter_answer": 4,
    }
    twice = next(
        row
        for row in read_jsonl(tmp_path / "out" / "predictions.jsonl")
        if row["id"] == "validation_Selfmade_twice-0"
    )
    assert twice["image_columns"] == ["image_1", "image_1", "image_2"]
