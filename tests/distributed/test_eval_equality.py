"""Both evaluations give the same numbers at any batch size, on 1, 2 and 3 gloo ranks, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import eval_benchmark
import eval_valloss
import pytest
import torch
from eval_runs import MMMU_FILES, VALLOSS_FILES, contents, make_benchmark, make_validation, run, start
from odb_workflow.model.load import load_model, load_processor
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.runtime.files import read_jsonl
from odb_workflow.tmdb.images import read_image
from odb_workflow.tmdb.split import split_rows
from odb_workflow.tmdb.store import RecordStore

pytestmark = pytest.mark.distributed

BUDGETS = {"one": 1, "middle": 700, "largest": 1 << 30}
VAL_SIZE = "0.6"


@pytest.fixture(scope="module")
def validation(tiny_model_dir: Path, tiny_tmdb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_validation(tiny_model_dir, tiny_tmdb, tmp_path_factory.mktemp("validation"))


@pytest.fixture
def valloss_argv(tiny_model_dir: Path, tiny_tmdb: Path, validation: Path, tmp_path: Path) -> Callable:
    def argv(name: str, *more: str) -> tuple[list[str], Path]:
        output = tmp_path / name
        base = ["--checkpoint", str(tiny_model_dir), "--data", str(tiny_tmdb)]
        base += ["--validation", str(validation), "--output-dir", str(output)]
        return [*base, "--val-size", VAL_SIZE, "--device", "cpu", *more], output

    return argv


@pytest.fixture(scope="module")
def benchmark_rows(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_benchmark(repository, tmp_path_factory.mktemp("benchmark"))


@pytest.fixture
def mmmu_argv(tiny_model_dir: Path, benchmark_rows: Path, tmp_path: Path) -> Callable:
    def argv(name: str, *more: str) -> tuple[list[str], Path]:
        output = tmp_path / name
        base = ["--checkpoint", str(tiny_model_dir), "--dataset", str(benchmark_rows)]
        return [*base, "--output-dir", str(output), "--device", "cpu", *more], output

    return argv


def losses(folder: Path) -> dict[str, float]:
    return {line["id"]: line["loss"] for line in read_jsonl(folder / "per_sample_losses.jsonl")}


def plain_losses(model_dir: Path, data: Path) -> dict[str, tuple[float, int]]:
    """The published way: one sample at a time through transformers, its own loss."""
    model, processor = load_model(model_dir, dtype=torch.float32), load_processor(model_dir, 589824)
    store, samples = RecordStore(data), SampleProcessor(processor, 16384, data)
    result = {}
    for row in split_rows(len(store), val_size=float(VAL_SIZE)).validation.tolist():
        sample = samples(store[row], row)
        names = ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
        inputs = {name: sample[name][None] for name in names}
        inputs |= {name: sample[name] for name in ("pixel_values", "image_grid_thw") if name in sample}
        with torch.no_grad():
            loss = float(model(**inputs).loss)
        result[store[row].id] = (loss, int((sample["labels"][1:] != -100).sum()))
    return result


def plain_letters(model_dir: Path, rows: Path) -> dict[str, list[float]]:
    """The published way: one prompt at a time through processor and model, the last position's letters."""
    model, processor = load_model(model_dir, dtype=torch.float32), load_processor(model_dir, 589824)
    ids = [processor.tokenizer(letter)["input_ids"][0] for letter in "ABCDEFGH"]
    result = {}
    for row in read_jsonl(rows):
        if row["answer"] not in list("ABCDEFGH"):
            continue
        images = [read_image(rows.parent / row[f"image_{n}"]).image for n in range(1, 8) if row[f"image_{n}"]]
        options = "\n".join(f"({'ABCDEFGH'[n]}) {text}" for n, text in enumerate(json_list(row["options"])))
        text = f"{row['question']}\n{options}\nAnswer with the option letter only."
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
        chat = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = processor(
            text=[chat], images=images or None, return_tensors="pt", return_mm_token_type_ids=True
        )
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1].float()
        result[row["id"]] = logits.log_softmax(-1)[ids].tolist()
    return result


def json_list(text: str) -> list[str]:
    return json.loads(text.replace("'", '"'))


def test_validation_loss_is_the_plain_loops_at_every_batch_size(
    valloss_argv: Callable, tiny_model_dir: Path, tiny_tmdb: Path, tmp_path: Path
):
    expected = plain_losses(tiny_model_dir, tiny_tmdb)
    tokens = sum(count for _, count in expected.values())
    mean = sum(loss for loss, _ in expected.values()) / len(expected)
    weighted = sum(loss * count for loss, count in expected.values()) / tokens
    runs = [("one", "pad"), ("middle", "pad"), ("largest", "pad"), ("middle", "pack")]
    for budget, padding in runs:
        argv, output = valloss_argv(
            f"{budget}-{padding}", "--token-budget", str(BUDGETS[budget]), "--padding", padding
        )
        run(eval_valloss.main, argv, tmp_path / "log")
        results = json.loads((output / "eval_results.json").read_text())
        assert results["eval_samples"] == len(expected) == 36
        assert results["label_tokens"] == tokens
        assert results["eval_loss"] == pytest.approx(mean, rel=1e-5)
        assert results["token_weighted_eval_loss"] == pytest.approx(weighted, rel=1e-5)
        # In validation order, each sample once, each with its own loss.
        assert list(losses(output)) == list(expected)
        assert losses(output) == pytest.approx({name: loss for name, (loss, _) in expected.items()}, rel=1e-5)
        assert not (output / "partial").exists()


def test_validation_loss_is_equal_byte_for_byte_on_1_2_and_3_ranks_and_after_a_kill(
    valloss_argv: Callable, tmp_path: Path
):
    budget = ("--token-budget", str(BUDGETS["middle"]))
    argv, output = valloss_argv("one", *budget)
    run(eval_valloss.main, argv, tmp_path / "log-1")
    expected = contents(output, VALLOSS_FILES)
    for world_size in (2, 3):
        argv, output = valloss_argv(f"world-{world_size}", *budget)
        run(eval_valloss.main, argv, tmp_path / f"log-{world_size}", world_size)
        assert contents(output, VALLOSS_FILES) == expected
        assert json.loads((output / "run_record.json").read_text())["world_size"] == world_size
    argv, output = valloss_argv("killed", *budget)
    kill_in_the_middle(eval_valloss.main, argv, output, tmp_path / "log-killed", world_size=2)
    assert not (output / "eval_results.json").exists()
    text = run(eval_valloss.main, argv, tmp_path / "log-again")
    assert "samples were scored by an earlier run" in text
    assert contents(output, VALLOSS_FILES) == expected
    assert json.loads((output / "run_record.json").read_text())["samples_reused_from_an_earlier_run"] > 0


def kill_in_the_middle(main: Callable, argv: list[str], output: Path, log: Path, world_size: int):
    """SIGKILL all ranks once two batches are kept and before the run can have ended."""
    processes = start(main, argv, world_size, log, slow=0.3)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = sum(file.read_bytes().count(b"\n") for file in output.glob("partial/*/launch-*.jsonl"))
        if lines >= 2:
            break
        assert all(process.is_alive() for process in processes), Path(f"{log}.0").read_text()
        time.sleep(0.02)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL


def test_letters_are_the_plain_loops_at_every_batch_size_rank_count_and_after_a_kill(
    mmmu_argv: Callable, tiny_model_dir: Path, benchmark_rows: Path, tmp_path: Path
):
    expected = plain_letters(tiny_model_dir, benchmark_rows)
    letters: dict[str, list[str]] = {}
    for budget in BUDGETS:
        argv, output = mmmu_argv(budget, "--token-budget", str(BUDGETS[budget]))
        run(eval_benchmark.main, argv, tmp_path / "log")
        predictions = read_jsonl(output / "predictions.jsonl")
        assert [row["id"] for row in predictions] == list(expected)
        for row in predictions:
            assert list(row["candidate_scores"].values()) == pytest.approx(expected[row["id"]], abs=2e-5)
        letters[budget] = [row["prediction"] for row in predictions]
        results = json.loads((output / "mmmu_mc_likelihood_results.json").read_text())
        assert (results["num_scored"], results["excluded_by_reason"]) == (32, {"non_letter_answer": 4})
        assert results["rows_naming_missing_images"] == 4
        assert results["option_status_counts"]["answer_outside_options_scored_all_letters"] == 4
        assert json.loads((output / "score_audit.json").read_text())["consistent"]
    assert letters["one"] == letters["middle"] == letters["largest"]

    expected_files = contents(tmp_path / "middle", MMMU_FILES)
    budget = ("--token-budget", str(BUDGETS["middle"]))
    for world_size in (2, 3):
        argv, output = mmmu_argv(f"world-{world_size}", *budget)
        run(eval_benchmark.main, argv, tmp_path / f"log-{world_size}", world_size)
        assert contents(output, MMMU_FILES) == expected_files
    argv, output = mmmu_argv("killed", *budget)
    kill_in_the_middle(eval_benchmark.main, argv, output, tmp_path / "log-killed", world_size=1)
    text = run(eval_benchmark.main, argv, tmp_path / "log-again")
    assert "samples were scored by an earlier run" in text
    assert contents(output, MMMU_FILES) == expected_files


def test_bf16_letters_do_not_depend_on_who_shares_the_batch(mmmu_argv: Callable, tmp_path: Path):
    letters, rescored = [], []
    for budget in ("one", "largest"):
        argv, output = mmmu_argv(
            f"bf16-{budget}", "--precision", "bf16", "--token-budget", str(BUDGETS[budget])
        )
        run(eval_benchmark.main, argv, tmp_path / "log")
        predictions = read_jsonl(output / "predictions.jsonl")
        letters.append([row["prediction"] for row in predictions])
        rescored.append(sum(row["rescored_alone"] for row in predictions))
        results = json.loads((output / "mmmu_mc_likelihood_results.json").read_text())
        assert (results["dtype"], results["rescoring_margin_nat"]) == ("bf16", 0.05)
        assert results["rescored_alone"] == rescored[-1]
    assert letters[0] == letters[1]
    assert min(rescored) > 0, "the random model has close calls"


def test_the_real_launcher_on_two_ranks(valloss_argv: Callable, repository: Path, tmp_path: Path):
    argv, output = valloss_argv("launched", "--max-samples", "9", "--num-workers", "1")
    # as the rules start it: the launcher alone says that there is no GPU
    at = argv.index("--device")
    del argv[at : at + 2]
    program = str(repository / "workflow_scripts" / "eval_valloss.py")
    launcher = [sys.executable, str(repository / "workflow_scripts" / "launch.py")]
    done = subprocess.run(
        [*launcher, "--processes", "2", "--gpus", "0", "--threads", "2", "--", program, *argv],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("eval_results.json") == 1, "rank 0 alone speaks"
    results = json.loads((output / "eval_results.json").read_text())
    assert results["eval_samples"] == 9
    assert json.loads((output / "run_record.json").read_text())["world_size"] == 2
