"""Run on several ranks: compares what several ranks compute with one process, and provokes unequal ranks.

Writes one JSON document of measured numbers; the tests state the right values.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from odb_workflow.loaders.collate import Collator
from odb_workflow.loaders.epoch_plan import epoch_positions
from odb_workflow.loaders.factory import build_epoch_loader
from odb_workflow.model.forward import build_forward
from odb_workflow.model.freeze import apply_freezing
from odb_workflow.model.load import load_model, load_processor
from odb_workflow.runtime.errors import UserError
from odb_workflow.training.agreement import RankCounts, Ranks
from odb_workflow.training.arguments import loader_settings, parse_arguments
from odb_workflow.training.book import StepBook
from odb_workflow.training.data import load_training_data
from odb_workflow.training.engines import DeepSpeedEngine, OptimizerSettings, PlainEngine, trainable
from odb_workflow.training.loss_scaling import loss_factor
from odb_workflow.training.process import StopRequest
from odb_workflow.training.setup import check_equal_on_ranks, deepspeed_settings, make_accelerator
from odb_workflow.training.steps import MicroBatch, Mover, Step, agreed_steps

CPU = torch.device("cpu")
SETTINGS = OptimizerSettings(weight_decay=0.0, max_grad_norm=0.5, precision="fp32", fused=False)
RATE = 1e-3


class Checks:
    """The checks of one launch; every rank runs them all in the same order."""

    def __init__(self, options: argparse.Namespace) -> None:
        common = ["--model", options.model, "--data", options.data, "--validation", options.validation]
        common += ["--output-dir", str(options.out.parent), "--precision", "fp32", "--val-size", "0.1"]
        common += ["--max-length", "4096", "--num-workers", "1", "--cpu", "--token-budget", "600"]
        common += ["--buffer-size", "24", "--prefetch-factor", "24", "--fixed-batch-size", "3"]
        if options.deepspeed:
            common += ["--deepspeed-config", options.deepspeed, "--max-grad-norm", "0.5"]
        self.common = common
        self.args = parse_arguments([*common, "--loader", "odb"])
        self.deepspeed = deepspeed_settings(self.args)
        self.accelerator = make_accelerator(self.args, self.deepspeed, cpu=True)
        self.ranks = Ranks(self.accelerator.process_index, self.accelerator.num_processes)
        processor = load_processor(options.model, 589824)
        self.data = load_training_data(self.args, processor)
        self.model = load_model(options.model, torch.float32)
        self.collate = Collator.from_config(self.model.config, processor.tokenizer.pad_token_id)
        self.results: dict[str, Any] = {"world_size": self.ranks.world_size}

    def engine(self, vision: bool) -> tuple[Any, torch.nn.Module]:
        """A fresh engine over a fresh copy of the model."""
        model = copy.deepcopy(self.model)
        apply_freezing(model, vision_tower=not vision, projector=not vision)
        forward = build_forward(model, "auto", CPU, training=True)
        if self.deepspeed:
            return DeepSpeedEngine(forward, self.accelerator, SETTINGS), forward
        return PlainEngine(forward, CPU, self.ranks.world_size, SETTINGS), forward

    def union(
        self, rows: list[int], vision: bool
    ) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
        """Gradient, its norm and the weights after a step of one process on all rows as one batch."""
        model = copy.deepcopy(self.model)
        apply_freezing(model, vision_tower=not vision, projector=not vision)
        forward = build_forward(model, "auto", CPU, training=True)
        engine = PlainEngine(forward, CPU, 1, SETTINGS)
        where = [int(np.flatnonzero(self.data.rows == row)[0]) for row in rows]
        batch = self.collate([self.data.dataset[i] for i in where])
        engine.accumulate(batch, 1.0 / int(batch["label_counts"].sum()), last=True)
        gradient = {name: p.grad.clone() for name, p in trainable(forward).items() if p.grad is not None}
        norm = float(engine.step(RATE))
        return gradient, norm, {name: p.detach().clone() for name, p in trainable(forward).items()}

    def compare(self, name: str, micro_batches: list[MicroBatch], vision: bool = False) -> None:
        """Train one step on these micro-batches of this rank and compare with one process on the union."""
        counts = self.ranks.agree(
            RankCounts(
                batches=len(micro_batches),
                label_tokens=sum(m.counts.label_tokens for m in micro_batches),
                real_tokens=sum(m.counts.real_tokens for m in micro_batches),
            )
        )
        engine, forward = self.engine(vision)
        for number, micro in enumerate(micro_batches, start=1):
            factor = loss_factor(
                "label_tokens",
                micro.counts,
                step_label_tokens=counts.label_tokens,
                step_real_tokens=counts.real_tokens,
                micro_batches=len(micro_batches),
                world_size=self.ranks.world_size,
            )
            engine.accumulate(micro.tensors, factor, last=number == len(micro_batches))
        gradient = {key: self.gradient(p) for key, p in trainable(forward).items()}
        norm = float(engine.step(RATE))
        mine = np.concatenate([m.rows for m in micro_batches])
        rows = [int(row) for part in self.ranks.gather_objects(mine) for row in part]
        want, want_norm, weights = self.union(rows, vision)
        start = {f"model.{key}": p for key, p in self.model.named_parameters()}
        moved = {key: p.detach() - start[key] for key, p in trainable(forward).items()}
        wanted_move = {key: p - start[key] for key, p in weights.items()}
        self.results[name] = {
            "gradient": distance(gradient, want),
            "norm": abs(norm - want_norm) / want_norm,
            "norm_value": want_norm,
            "step": distance(moved, wanted_move),
            "weights": distance({k: p.detach() for k, p in trainable(forward).items()}, weights),
            "samples": len(rows),
        }

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The averaged gradient of a parameter."""
        if not self.deepspeed:
            return parameter.grad.clone()
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter).clone()

    def first_step(self, loader_name: str, accumulation: int) -> list[MicroBatch]:
        """The micro-batches of this rank in the first optimizer step of a loader."""
        settings = loader_settings(
            parse_arguments([*self.common, "--loader", loader_name, "--no-warmup-buffer"])
        )
        loader = build_epoch_loader(
            settings,
            self.data.dataset,
            self.collate,
            epoch_positions(len(self.data.rows), 42, 0),
            self.data.lengths,
            epoch=0,
            segment=accumulation,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
        )
        steps = agreed_steps(
            loader, self.ranks, StopRequest(), Mover(CPU, False), accumulation, lambda: False
        )
        try:
            return next(steps).micro_batches
        finally:
            loader.close()

    def with_modality(self, images: bool, count: int = 3) -> list[MicroBatch]:
        """One micro-batch of text-only samples, or of samples with images."""
        found = [i for i in range(len(self.data.rows)) if ("pixel_values" in self.data.dataset[i]) == images]
        mine = [found[(self.ranks.rank * count + i) % len(found)] for i in range(count)]
        return [MicroBatch.from_batch(self.collate([self.data.dataset[i] for i in mine]))]

    def said_by(self, action: Any) -> list[dict[str, Any]]:
        """What an action raises on each rank, and after how many seconds."""
        began = time.monotonic()
        try:
            action()
            said = {"error": None}
        except UserError as error:
            said = {"error": str(error)}
        return self.ranks.gather_objects(said | {"seconds": time.monotonic() - began})

    def unequal(self) -> None:
        """Ranks that do not belong together must stop together."""
        rank = self.ranks.rank

        def batches(count: int, fail_after: int | None = None) -> Any:
            for number in range(count):
                if number == fail_after:
                    raise UserError("the disk is gone")
                yield self.collate([self.data.dataset[number]])

        def consume(loader: Any) -> None:
            for _ in agreed_steps(loader, self.ranks, StopRequest(), Mover(CPU, False), 1, lambda: False):
                pass

        self.results["uneven"] = self.said_by(lambda: consume(batches(3 - rank)))
        self.results["failed"] = self.said_by(lambda: consume(batches(3, fail_after=1 if rank else None)))
        self.results["config"] = self.said_by(
            lambda: check_equal_on_ranks(self.ranks, {"lr": 1e-3 * (1 + rank)})
        )
        micro = MicroBatch.from_batch(self.collate([self.data.dataset[rank]]))
        counts = self.ranks.agree(RankCounts(batches=1, samples=1, real_tokens=5, label_tokens=2))
        book = StepBook(self.ranks, 1, CPU, write=lambda entry: None, name_rows=self.data.names)
        loss = torch.tensor(float("nan") if rank else 1.0)
        self.results["nan"] = self.said_by(
            lambda: book.note(Step([micro], counts, 0.0), 0, 1e-3, [loss], 1.0)
        )
        self.results["nan_name"] = self.ranks.gather_objects(self.data.names(micro.rows)[0])

    def run(self, with_odb: bool) -> None:
        """All checks."""
        for loader in ("standard", "odb") if with_odb else ("standard",):
            for accumulation in (1, 2):
                self.compare(f"{loader}-{accumulation}", self.first_step(loader, accumulation))
        mixed = self.with_modality(images=self.ranks.rank > 0)
        self.compare("mixed-frozen", mixed)
        self.compare("mixed-trained", mixed, vision=True)
        self.compare("text-trained", self.with_modality(images=False), vision=True)
        self.unequal()


def distance(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of ``want``; a tensor missing in ``want`` counts as 0."""
    difference = sum(
        float((tensor.detach().double() - (want[key].double() if key in want else 0)).square().sum())
        for key, tensor in have.items()
    )
    return (difference / sum(float(tensor.double().square().sum()) for tensor in want.values())) ** 0.5


def main() -> int:
    """Run all checks and write their numbers."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--data", "--validation"):
        parser.add_argument(name, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deepspeed", default="")
    options = parser.parse_args()
    checks = Checks(options)
    checks.run(with_odb=True)
    if checks.ranks.is_main:
        options.out.write_text(json.dumps(checks.results))
    checks.ranks.barrier()
    torch.distributed.destroy_process_group()
    return 0
