#!/usr/bin/env python3
"""Both evaluations against the plain batch-1 loop, in one process, on the same samples.

On a CPU: the embedded model and data. On a GPU: Qwen3-VL-2B's architecture with random weights, pictures of
about 300 tokens and answers of about 450, all of different shapes, because kernels that plan per shape look
fast on repeated ones. Times are end to end per sample: reading, processing, forward; loading the model is
left out. The plain loop is the
published form: one sample at a time through transformers' forward with its attention mask.

    python benchmarks/evaluation.py                      # CPU or GPU, whatever there is
    python benchmarks/evaluation.py --samples 2000 --plain-samples 200 --performance '{"compile_layers":
    true}'

Results are appended to evaluation.jsonl beside this file; evaluation.md is written anew from all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workflow_scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dataset_builder"))

import torch
from evaluation_data import make_2b, make_embedded, make_synthetic
from odb_workflow.evaluation.letters import letter_token_ids
from odb_workflow.evaluation.mmmu import PromptItems, build_prompts, letter_scorer, measure_prompts
from odb_workflow.evaluation.mmmu_data import load_benchmark
from odb_workflow.evaluation.mmmu_protocol import IMAGES_FIRST, LETTERS
from odb_workflow.evaluation.partial import PartialResults
from odb_workflow.evaluation.plan import plan_batches
from odb_workflow.evaluation.prompts import PromptEncoder
from odb_workflow.evaluation.ranks import EvaluationRanks
from odb_workflow.evaluation.runner import WorkerSettings, default_workers, score_items
from odb_workflow.evaluation.scoring import choose_letter
from odb_workflow.evaluation.valloss import ValidationItems, loss_scorer
from odb_workflow.loaders.collate import Collator
from odb_workflow.model.forward import VLMForward, build_forward
from odb_workflow.model.load import load_model, load_processor
from odb_workflow.processing.dataset import SampleDataset
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.runtime.provenance import git_state, now, package_versions
from odb_workflow.tmdb.accepted import AcceptedSet
from odb_workflow.tmdb.images import read_image
from odb_workflow.tmdb.store import RecordStore
from odb_workflow.tmdb.validate import validate_tmdb
from torch.utils.data import DataLoader

HERE = Path(__file__).resolve().parent
MODEL_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
    add("--samples", type=int, default=1000 if cuda else 300, help="samples for the batched form")
    add("--plain-samples", type=int, default=200 if cuda else 300, help="of them, for the plain loop")
    add("--token-budget", type=int, default=49152 if cuda else 16384)
    add("--padding", choices=["pad", "pack"], default="pack" if cuda else "pad")
    add("--performance", default="auto", help="auto, or switches as JSON")
    add("--num-workers", type=int, default=-1)
    add("--repeats", type=int, default=1 if cuda else 3, help="the best of so many is reported")
    add("--work", type=Path, help="folder for the made data; default: a temporary one")
    return parser.parse_args()


class Bench:
    """One model, one set of samples, both evaluations in both forms."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.device = torch.device(options.device)
        self.ranks = EvaluationRanks(0, 1, 1, self.device)
        make = make_synthetic if options.device == "cuda" else make_embedded
        model_dir, data, rows = make(work, options.samples + 16)
        self.processor = load_processor(model_dir, 589824)
        self.model = (
            make_2b(self.processor.tokenizer, options.device)
            if options.device == "cuda"
            else load_model(model_dir, dtype=torch.float32)
        )
        validation = work / "validation"
        validate_tmdb(data, self.processor, max_length=16384, output_dir=validation, progress=False)
        accepted = AcceptedSet.load(validation)
        self.samples = SampleDataset(
            RecordStore(data), accepted.rows, SampleProcessor(self.processor, 16384, data)
        )
        self.lengths = [int(length) for length in accepted.lengths]
        self.encoder = PromptEncoder(self.processor)
        self.prompts, _ = build_prompts(
            load_benchmark(str(rows), "validation", None),
            self.processor,
            protocol=IMAGES_FIRST,
            max_samples=options.samples + 16,
            bad_rows="error",
        )
        self.letters = letter_token_ids(self.processor.tokenizer, self.prompts[0].rendered)
        workers = options.num_workers
        self.loader = WorkerSettings(default_workers(self.device, 1) if workers < 0 else workers)
        self.runs = 0

    def autocast(self) -> Any:
        """As the published scripts: bf16 on a GPU."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    def plain(self) -> None:
        """Bring the model into the published form."""
        build_forward(self.model, "reference", self.device, training=False)

    def batched(self) -> VLMForward:
        """Bring the model into this project's form."""
        return build_forward(self.model, self.options.performance, self.device, training=False)

    def plain_losses(self, indices: list[int]) -> dict[str, float]:
        """The published loop over validation samples."""
        loader = DataLoader(
            [*indices],
            batch_size=None,
            collate_fn=lambda index: (index, self.samples[index]),
            num_workers=min(4, self.loader.num_workers),
        )
        result = {}
        for index, sample in loader:
            names = (*MODEL_INPUTS, "labels")
            inputs = {
                name: (sample[name] if name.startswith(("pixel", "image")) else sample[name][None]).to(
                    self.device
                )
                for name in names
                if name in sample
            }
            with torch.no_grad(), self.autocast():
                result[str(index)] = self.model(**inputs, use_cache=False).loss.float().item()
        return result

    def batched_losses(self, indices: list[int]) -> dict[str, float]:
        """The same numbers, batched."""
        forward = self.forward
        items = ValidationItems(self.samples, [str(index) for index in range(len(self.samples))])
        statistics = self.score(items, indices, self.lengths, loss_scorer(forward), forward)
        return {key: total / count for key, (total, count) in statistics.values.items()}

    def plain_letters(self, indices: list[int]) -> dict[str, list[float]]:
        """The published loop over prompts."""
        result = {}
        for index in indices:
            prompt = self.prompts[index]
            images = [read_image(prompt.row.image(number)).image for number in prompt.question.images]
            inputs = self.processor(
                text=[prompt.rendered],
                images=images or None,
                return_tensors="pt",
                return_mm_token_type_ids=True,
            ).to(self.device)
            with torch.no_grad(), self.autocast():
                logits = self.model(**inputs, use_cache=False).logits[0, -1].float()
            result[str(index)] = logits.log_softmax(-1)[self.letters].tolist()
        return result

    def batched_letters(self, indices: list[int]) -> dict[str, list[float]]:
        """The same numbers, batched; the measuring of lengths is part of the time."""
        forward = self.forward
        chosen = [self.prompts[index] for index in indices]
        measure_prompts(chosen, self.encoder, self.ranks, min(16, len(os.sched_getaffinity(0))))
        items = PromptItems(self.prompts, self.encoder)
        items.key = str  # type: ignore[method-assign]
        lengths = [prompt.tokens for prompt in self.prompts]
        return dict(
            self.score(
                items, indices, lengths, letter_scorer(forward, self.letters, self.device), forward
            ).values
        )

    def score(
        self, items: Any, indices: list[int], lengths: list[int], scorer: Callable, forward: VLMForward
    ) -> Any:
        """Plan, load, score."""
        self.runs += 1
        options = self.options
        plan = plan_batches(
            [lengths[index] for index in indices], options.token_budget, packed=options.padding == "pack"
        )
        tokenizer = self.processor.tokenizer
        collator = Collator.from_config(
            self.model.config,
            tokenizer.pad_token_id,
            padding=options.padding,
            pixel_dtype=torch.bfloat16 if self.device.type == "cuda" else None,
        )
        return score_items(
            items,
            [[indices[place] for place in batch] for batch in plan],
            collator,
            scorer,
            ranks=self.ranks,
            partial=PartialResults(self.work / "partial", {"run": self.runs}),
            loader=self.loader,
        )

    def timed(self, function: Callable, indices: list[int]) -> tuple[dict, float, int | None]:
        """Values, best seconds, peak GPU bytes."""
        cuda = self.device.type == "cuda"
        best, values, peak = math.inf, {}, None
        for _ in range(self.options.repeats):
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            values = function(indices)
            if cuda:
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated()
            best = min(best, time.perf_counter() - start)
        return values, best, peak

    def compare(self, name: str, plain: Callable, batched: Callable) -> dict[str, Any]:
        """Both forms of one evaluation; the last samples warm up and are not timed."""
        count, few = self.options.samples, min(self.options.plain_samples, self.options.samples)
        warm, many, part = list(range(count, count + 16)), list(range(count)), list(range(few))
        self.plain()
        plain(warm)
        slow, slow_seconds, slow_peak = self.timed(plain, part)
        self.forward = self.batched()
        batched(warm)
        fast, fast_seconds, fast_peak = self.timed(batched, many)
        lengths = self.lengths if name == "valloss" else [prompt.tokens for prompt in self.prompts]
        row: dict[str, Any] = {
            "evaluation": name,
            "plain": {
                "samples": few,
                "seconds": slow_seconds,
                "per_second": few / slow_seconds,
                "peak": slow_peak,
            },
            "batched": {
                "samples": count,
                "seconds": fast_seconds,
                "per_second": count / fast_seconds,
                "tokens_per_second": sum(lengths[:count]) / fast_seconds,
                "peak": fast_peak,
            },
            "ratio": (count / fast_seconds) / (few / slow_seconds),
            "mean_tokens": sum(lengths[:count]) / count,
            "switches": dict(self.forward.switches),
        }
        if name == "valloss":
            a, b = (math.fsum(source[str(index)] for index in part) / few for source in (slow, fast))
            row["relative_difference_of_means"] = abs(a - b) / a
        else:
            row["equal_letters"] = sum(
                choose_letter(slow[str(index)], LETTERS[:4])[0]
                == choose_letter(fast[str(index)], LETTERS[:4])[0]
                for index in part
            )
        return row


def main() -> None:
    """Measure, append, write the page."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="evaluation-benchmark-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, work)
        result = {
            "time": now(),
            "git": git_state(),
            "versions": {name: package_versions()[name] for name in ("python", "torch", "transformers")},
            "device": torch.cuda.get_device_name()
            if options.device == "cuda"
            else f"{os.cpu_count()} CPU cores",
            "model": "Qwen3-VL-2B, random weights" if options.device == "cuda" else "embedded",
            "precision": "bf16" if options.device == "cuda" else "fp32",
            "threads": torch.get_num_threads(),
            "token_budget": options.token_budget,
            "padding": options.padding,
            "num_workers": bench.loader.num_workers,
            "rows": [],
        }
        for name, plain, batched in (
            ("valloss", bench.plain_losses, bench.batched_losses),
            ("mmmu", bench.plain_letters, bench.batched_letters),
        ):
            row = bench.compare(name, plain, batched)
            result["rows"].append(row)
            print(json.dumps({key: row[key] for key in row if key != "switches"}), flush=True)
    with open(HERE / "evaluation.jsonl", "a", encoding="utf-8") as handle:
        handle.write(json.dumps(result) + "\n")
    (HERE / "evaluation.md").write_text(page(HERE / "evaluation.jsonl"), encoding="utf-8")


def page(results: Path) -> str:
    """All results as one table."""
    intro = (__doc__ or "").split("\n\n")
    lines = [
        "# Evaluation against the plain batch-1 loop",
        "",
        intro[1],
        "",
        "Command: `python benchmarks/evaluation.py`.",
        "",
    ]
    heads = ["date", "device", "model", "evaluation", "batches", "plain, samples/s"]
    heads += ["batched, samples/s (tokens/s)", "ratio", "peak memory plain / batched", "agreement"]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for text in results.read_text(encoding="utf-8").splitlines():
        result = json.loads(text)
        for row in result["rows"]:
            plain, batched = row["plain"], row["batched"]
            agreement = (
                f"mean loss {row['relative_difference_of_means']:.1e} relative"
                if "relative_difference_of_means" in row
                else f"{row['equal_letters']} of {plain['samples']} letters"
            )
            peaks = " / ".join(
                f"{form['peak'] / 1e9:.1f} GB" if form["peak"] else "-" for form in (plain, batched)
            )
            compiled = ", compiled" if row["switches"].get("compile_layers") else ""
            lines.append(
                f"| {result['time'][:10]} | {result['device']}, torch {result['versions']['torch']} | "
                f"{result['model']}, {result['precision']} | {row['evaluation']} | "
                f"{result['padding']} {result['token_budget']:,}{compiled} | {plain['per_second']:.1f} | "
                f"{batched['per_second']:.1f} ({batched['tokens_per_second']:,.0f}) | {row['ratio']:.1f} | "
                f"{peaks} | {agreement} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
