#!/usr/bin/env python3
"""Measure the published form of training and evaluation, and ours, on one GPU, on the same batches.

Qwen3-VL-2B's architecture with random weights; data in the manner of MM-Mix (seven sources, shapes never
seen twice); vision frozen, the language model trained; bf16. Five parts, in this order:

equality    loss and gradient norm against the plain forward, and of both against float32
steps       the training step alone
engines     the same with and without ZeRO-2, in the real preset's form (checkpointed, not compiled)
evaluation  validation loss and letter likelihoods
end_to_end  ``train_accelerate.py`` on JPEG files

Every measurement is appended to --output as one JSON line when it is made; a table is printed last. Nothing
starts that --deadline leaves no time for.

    python benchmarks/gpu_record.py --output gpu_record.jsonl                       # on a GPU
    python benchmarks/gpu_record.py --tiny --device cpu --output tiny.jsonl         # tries every path
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workflow_scripts"))

import torch
from gpu_bench import end_to_end
from gpu_bench.architecture import architecture, random_model, restore_rotary
from gpu_bench.engines import EngineStep
from gpu_bench.evaluate import OurEvaluation, PlainEvaluation
from gpu_bench.mix import PixelPool, Shape, describe, draw_shapes, odb_groups
from gpu_bench.recorder import Recorder, free_memory, table
from gpu_bench.steps import BatchMaker, OurStep, PublishedStep, busy_share, gradient_norm, measure
from odb_workflow.model.freeze import apply_freezing

PARTS = ("equality", "steps", "evaluation", "end_to_end", "engines")


class Bench:
    """What all measurements share: model, batches, record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tiny = args.tiny
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.record = Recorder(args.output, args.deadline, shlex.join([sys.executable, *sys.argv]))
        self.config = architecture(args.tiny)
        self.dtype = torch.float32 if args.tiny and not self.cuda else torch.bfloat16
        self.buffer = 64 if self.tiny else 1024
        shapes = 256 if self.tiny else 8192
        self.shapes = draw_shapes(shapes, args.seed, shrink=8 if self.tiny else 1)
        self.lengths = [shape.length for shape in self.shapes]
        self.record.add("data", **describe(self.shapes))
        self.compiled = {"compile_layers": self.cuda}

    def start(self) -> None:
        """Make the model and the pool of pixels."""
        self.make_model()
        width = self.config.vision_config.patch_size**2 * 2 * 3
        pool = PixelPool(6_000 if self.tiny else 60_000, width, self.dtype, self.args.seed)
        self.batches = BatchMaker(self.config, pool, pinned=self.cuda)

    def make_model(self) -> None:
        """A fresh model; the one before it goes first."""
        self.model = None
        free_memory()
        self.model = random_model(self.config, self.device, self.dtype, self.args.seed)
        apply_freezing(self.model)

    def odb(self, budget: int, count: int) -> list[list[int]]:
        """``count`` groups of ODB at ``budget``."""
        return odb_groups(self.lengths, budget, self.buffer, self.args.seed)[:count]

    def fixed(self, size: int, count: int) -> list[list[int]]:
        """``count`` groups of ``size`` samples in random order."""
        return [list(range(start * size, (start + 1) * size)) for start in range(count)]


def measure_equality(bench: Bench) -> None:
    """Loss and gradient norm against the plain forward in bf16, and of both against float32."""
    groups = bench.odb(1024 if bench.tiny else 12_288, 6)[-2:]

    def figures(step: Any, padding: str) -> list[tuple[float, float]]:
        batches = bench.batches(bench.shapes, groups, padding, step.pixel_dtype)
        found = [gradient_norm(step, batch, bench.model) for batch in batches]
        step.close()
        return found

    def apart(
        found: list[tuple[float, float]], from_what: list[tuple[float, float]], name: str
    ) -> dict[str, float]:
        pairs = list(zip(found, from_what, strict=True))
        return {
            f"loss_from_{name}": max(abs(one[0] / other[0] - 1) for one, other in pairs),
            f"gradient_norm_from_{name}": max(abs(one[1] / other[1] - 1) for one, other in pairs),
        }

    plain = figures(PublishedStep(bench.model, bench.device), "pad")
    bench.model.float()
    exact = figures(PublishedStep(bench.model, bench.device, autocast=False), "pad")
    bench.model.to(bench.dtype)
    restore_rotary(bench.model)
    bench.record.add(
        "equality, published form",
        loss=plain[0][0],
        gradient_norm=plain[0][1],
        **apart(plain, exact, "float32"),
    )
    rounding = {"eager_rounding": True}
    for padding in ("pad", "pack"):
        for performance in (
            {"compile_layers": False},
            bench.compiled,
            bench.compiled | rounding,
            bench.compiled | {"checkpointing": "on"},
        ):
            step = OurStep(bench.model, bench.device, performance, sixteen_bit_states=True)
            found = figures(step, padding)
            bench.record.add(
                f"equality, {padding}, {performance}",
                **apart(found, plain, "plain"),
                **apart(found, exact, "float32"),
            )


def step_variants(bench: Bench) -> list[tuple[str, list[list[int]], str, dict[str, Any] | None, int, float]]:
    """Name, groups, padding, switches (None: published form), warm-up steps, seconds needed."""
    small, large = (512, 1024) if bench.tiny else (12_288, 49_152)
    n_small, n_large, n_one, n_eight = (4, 3, 6, 4) if bench.tiny else (22, 10, 64, 30)
    off = bench.compiled | {"checkpointing": "off"}
    full = bench.compiled | {"checkpointing": "on"}
    rounded = off | {"eager_rounding": True}
    eager = {"compile_layers": False}  # keeps about twice the bytes: checkpointing chooses by itself
    return [
        (f"ODB {small:,} padded, ours", bench.odb(small, n_small), "pad", off, 2, 40),
        (f"ODB {small:,} packed, ours", bench.odb(small, n_small), "pack", off, 2, 30),
        (f"ODB {large:,} packed, ours", bench.odb(large, n_large), "pack", off, 2, 35),
        (f"ODB {large:,} padded, ours", bench.odb(large, n_large), "pad", off, 2, 30),
        (f"ODB {large:,} packed, full checkpointing, ours", bench.odb(large, n_large), "pack", full, 2, 40),
        (f"ODB {large:,} packed, eager rounding, ours", bench.odb(large, n_large), "pack", rounded, 2, 40),
        ("fixed 1 padded, ours", bench.fixed(1, n_one), "pad", off, 4, 25),
        ("fixed 1 packed, ours", bench.fixed(1, n_one), "pack", off, 4, 20),
        ("fixed 8 padded, ours", bench.fixed(8, n_eight), "pad", off, 3, 25),
        ("fixed 8 packed, ours", bench.fixed(8, n_eight), "pack", off, 3, 20),
        (f"ODB {small:,} padded, published form", bench.odb(small, 12), "pad", None, 2, 40),
        ("fixed 1, published form", bench.fixed(1, 44), "pad", None, 4, 40),
        ("fixed 8, published form", bench.fixed(8, 16), "pad", None, 2, 40),
        (f"ODB {large:,} padded, published form", bench.odb(large, 6), "pad", None, 2, 40),
        (f"ODB {large:,} packed, ours, not compiled", bench.odb(large, 8), "pack", eager, 2, 30),
    ]


def measure_steps(bench: Bench) -> None:
    """The training step alone."""
    for name, groups, padding, performance, warm, needs in step_variants(bench):
        if bench.args.only not in name:
            continue
        with bench.record.measuring(name, needs) as there_is_time:
            if there_is_time:
                measure_one(bench, name, groups, padding, performance, warm)
        free_memory()
    with bench.record.measuring("GPU-busy share", 40) as there_is_time:
        if there_is_time and bench.cuda and not bench.args.only:
            measure_busy_share(bench)


def measure_busy_share(bench: Bench) -> None:
    """How much of the time the GPU works, ours and the published form."""
    ours = OurStep(bench.model, bench.device, bench.compiled | {"checkpointing": "off"})
    batches = bench.batches(bench.shapes, bench.odb(49_152, 14)[-4:], "pack", ours.pixel_dtype)
    bench.record.add("ODB 49,152 packed, ours, profiled", **busy_share(ours, batches))
    ours.close()
    plain = PublishedStep(bench.model, bench.device)
    batches = bench.batches(bench.shapes, bench.odb(12_288, 40)[-4:], "pad", plain.pixel_dtype)
    bench.record.add("ODB 12,288 padded, published form, profiled", **busy_share(plain, batches))
    plain.close()


def measure_engines(bench: Bench) -> None:
    """The engines in turn on the same batches."""
    budget, count = (512, 4) if bench.tiny else (12_288, 20)
    form = {"compile_layers": False, "checkpointing": "on"}
    variants = {
        "one process": None,
        "ZeRO-2": {},
        "ZeRO-2 without overlap": {"overlap_comm": False},
        "ZeRO-1": {"stage": 1, "overlap_comm": False},
    }
    for engine, changed in variants.items():
        with bench.record.measuring(f"engines, {engine}", 60) as there_is_time:
            if not there_is_time or bench.args.only not in engine:
                continue
            bench.make_model()  # DeepSpeed leaves its hooks on the weights
            step = EngineStep(bench.model, bench.device, form, changed, bench.args.output.parent)
            for name, groups in {
                "fixed 1": bench.fixed(1, 2 * count),
                f"ODB {budget:,}": bench.odb(budget, count),
            }.items():
                batches = bench.batches(bench.shapes, groups, "pad", step.pixel_dtype)
                figures = measure(step, batches, count // 4, bench.device)
                parts = step.parts(batches[-count // 4 :])
                what = f"{name} padded, checkpointed, {engine}"
                bench.record.add(what, **figures, **parts)
            step.close()
            del step


def measure_one(
    bench: Bench,
    name: str,
    groups: Sequence[Sequence[int]],
    padding: str,
    performance: dict[str, Any] | None,
    warm: int,
) -> None:
    """One variant; that with full checkpointing also with the published form's 16-bit optimizer states."""
    kinds: list[tuple[str, bool]] = [("", False)]
    if performance is not None and performance.get("checkpointing") == "on":
        kinds.append((", 16-bit states", True))
    for suffix, sixteen_bit in kinds:
        if performance is None:
            step: Any = PublishedStep(bench.model, bench.device)
        else:
            step = OurStep(bench.model, bench.device, performance, sixteen_bit)
        try:
            batches = bench.batches(bench.shapes, groups, padding, step.pixel_dtype)
            result = measure(step, batches, warm, bench.device)
        finally:
            step.close()
        switches = {} if performance is None else {"switches": step.forward.switches}
        bench.record.add(name + suffix, **result, **switches)


def measure_evaluation(bench: Bench) -> None:
    """Validation loss and letter likelihoods, ours and the published loop, on the same samples."""
    budget = 1024 if bench.tiny else 49_152
    plain_count, our_count = (12, 24) if bench.tiny else (104, 1200)
    letters = torch.arange(1000, 1008)
    for what in ("validation loss", "letters"):
        shapes = bench.shapes if what == "validation loss" else _prompts(bench, our_count)
        lengths = [shape.length for shape in shapes]
        rows = sorted(range(our_count), key=lambda n: lengths[n])
        groups, current = [], []
        for row in rows:
            if current and sum(lengths[n] for n in current) + lengths[row] > budget:
                groups.append(current)
                current = []
            current.append(row)
        groups.append(current)
        results = {}
        with bench.record.measuring(f"{what}, ours", 60) as there_is_time:
            if there_is_time:
                ours = OurEvaluation(bench.model, bench.device, bench.compiled)
                batches = bench.batches(shapes, groups, "pack", bench.dtype)
                method = ours.losses if what == "validation loss" else ours.letters
                extra = () if what == "validation loss" else (letters,)
                # the smallest and the largest group first: both settle what is compiled and allocated
                figures, values = method([batches[0], batches[-1], *batches], 2, *extra)
                results = dict(zip(rows, values[len(groups[0]) + len(groups[-1]) :], strict=True))
                bench.record.add(f"{what}, ours packed", **figures)
        free_memory()
        with bench.record.measuring(f"{what}, published form", 40) as there_is_time:
            if there_is_time:
                plain = PlainEvaluation(bench.model, bench.device)
                chosen = list(range(plain_count))
                batches = bench.batches(shapes, [[row] for row in chosen], "pad", torch.float32)
                method = plain.losses if what == "validation loss" else plain.letters
                figures, values = method(batches, 4, *(() if what == "validation loss" else (letters,)))
                bench.record.add(f"{what}, published form, batch 1", **figures)
                if results:
                    bench.record.add(f"{what}, agreement", **_agreement(what, chosen, values, results))
        free_memory()


def _agreement(what: str, chosen: list[int], values: list[Any], ours: dict[int, Any]) -> dict[str, Any]:
    if what == "letters":
        differing = [
            margin for row, (letter, margin) in zip(chosen, values, strict=True) if letter != ours[row]
        ]
        # With random weights letters lie close; a difference beyond rounding would show in the margin.
        return {
            "equal_letters": len(chosen) - len(differing),
            "of": len(chosen),
            "largest_margin_of_a_difference": max(differing, default=0.0),
        }
    worst = max(abs(ours[row] / value - 1) for row, value in zip(chosen, values, strict=True))
    mean_plain = sum(values) / len(values)
    mean_ours = sum(ours[row] for row in chosen) / len(chosen)
    return {"worst_relative": worst, "mean_relative": abs(mean_ours / mean_plain - 1)}


def _prompts(bench: Bench, count: int) -> list[Any]:
    """Prompts of a multiple-choice benchmark: an image of about 300 tokens and a question of about 100."""
    chance = random.Random(bench.args.seed + 1)
    scale = 8 if bench.tiny else 1
    prompts = []
    for _ in range(count):
        height = max(1, round(chance.uniform(12, 23) / scale**0.5))
        width = max(1, round(chance.uniform(12, 23) / scale**0.5))
        prompts.append(Shape("mmmu", (height, width), chance.randint(40, 160) // scale + 2, 2))
    return prompts


def measure_end_to_end(bench: Bench, folder: Path) -> None:
    """Whole trainings."""
    samples = 96 if bench.tiny else bench.args.samples
    prepared = end_to_end.prepare(folder, bench.config, samples, bench.device, bench.tiny, bench.args.seed)
    bench.record.add("end to end, prepared", **prepared)
    for run in end_to_end.runs(bench.tiny):
        if bench.args.only not in run.name:
            continue
        with bench.record.measuring(run.name, run.needs_seconds) as there_is_time:
            if there_is_time:
                figures = end_to_end.train(folder, run, bench.device, run.needs_seconds + 90, bench.tiny)
                bench.record.add(run.name, **figures)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("gpu_record.jsonl"), help="JSON lines; appended to")
    add("--parts", default=",".join(PARTS), help="which parts, with commas")
    add("--deadline", type=float, default=540, help="seconds after which nothing more is started")
    add("--only", default="", help="only training variants whose name holds this text")
    add("--samples", type=int, default=4500, help="samples of the end-to-end data")
    add("--device", default="cuda", help="cuda or cpu")
    add("--tiny", action="store_true", help="a tiny model and few steps, to try the script")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.parts = [part.strip() for part in args.parts.split(",") if part.strip()]
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --tiny --device cpu tries the script")
    return args


def main() -> int:
    """Run the parts asked for and print the table; 1 where a measurement failed (not for lack of memory)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    args = parse_arguments()
    bench = Bench(args)
    try:
        if set(args.parts) - {"end_to_end"}:
            bench.start()
            if "equality" in args.parts:
                with bench.record.measuring("equality", 90) as there_is_time:
                    if there_is_time:
                        measure_equality(bench)
            if "steps" in args.parts:
                measure_steps(bench)
            if "evaluation" in args.parts:
                measure_evaluation(bench)
            if "engines" in args.parts:
                measure_engines(bench)
            del bench.model
            free_memory()
        if "end_to_end" in args.parts:
            # A sample on its way from a worker holds an open file.
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            with tempfile.TemporaryDirectory(prefix="gpu-record-") as folder:
                measure_end_to_end(bench, Path(folder))
    finally:
        print(table(bench.record.lines), flush=True)
    return 1 if bench.record.faults else 0


if __name__ == "__main__":
    sys.exit(main())
