"""Evaluation of one model: the published loop, one sample at a time, and ours in packed batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from odb_workflow.model.forward import build_forward
from odb_workflow.training.steps import Mover

from .steps import MODEL_INPUTS, Batch


def _finish(seconds: float, samples: int, tokens: int, device: torch.device) -> dict[str, Any]:
    return {
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "real_tokens_per_second": tokens / seconds,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
    }


class PlainEvaluation:
    """One sample at a time through transformers, results read after each."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        build_forward(model, "reference", device, training=False)
        self.model, self.device = model, device

    @torch.inference_mode()
    def losses(self, batches: Sequence[Batch], warm: int) -> tuple[dict[str, Any], list[float]]:
        """Mean loss of each batch (of one sample); the first ``warm`` are not timed."""
        return self._timed(batches, warm, lambda output, batch: output.loss.item())

    @torch.inference_mode()
    def letters(
        self, batches: Sequence[Batch], warm: int, letter_ids: torch.Tensor
    ) -> tuple[dict[str, Any], list[tuple[int, float]]]:
        """Position of the likeliest of ``letter_ids`` after each prompt, and its lead over the second."""

        def choose(output: Any, batch: Batch) -> tuple[int, float]:
            values = output.logits[0, -1].float().log_softmax(-1)[letter_ids.to(self.device)]
            best, second = values.topk(2).values.tolist()
            return values.argmax().item(), best - second

        return self._timed(batches, warm, choose, labels=False)

    def _timed(
        self, batches: Sequence[Batch], warm: int, take: Any, labels: bool = True
    ) -> tuple[dict[str, Any], list[Any]]:
        results, began = [], time.perf_counter()
        for number, batch in enumerate(batches):
            if number == warm:
                _restart(self.device)
                began = time.perf_counter()
            names = [name for name in MODEL_INPUTS if name in batch and (labels or name != "labels")]
            inputs = {name: batch[name].to(self.device) for name in names}
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                results.append(take(self.model(**inputs, use_cache=False), batch))
        seconds = time.perf_counter() - began
        tokens = sum(int(batch["lengths"].sum()) for batch in batches[warm:])
        return _finish(seconds, len(batches) - warm, tokens, self.device), results


class OurEvaluation:
    """Packed batches through the fast forward; results stay on the device until the end."""

    def __init__(self, model: torch.nn.Module, device: torch.device, performance: dict[str, Any]) -> None:
        self.forward = build_forward(model, performance, device, training=False)
        self.device = device
        self.mover = Mover(device, device.type == "cuda")

    def losses(self, batches: Sequence[Batch], warm: int) -> tuple[dict[str, Any], list[float]]:
        """Mean loss of each sample, in the batches' order."""
        counts = torch.cat([batch["label_counts"] for batch in batches])
        result, sums = self._timed(batches, warm, lambda moved: self.forward(moved, "sample_losses"))
        return result, (sums / counts).tolist()

    def letters(
        self, batches: Sequence[Batch], warm: int, letter_ids: torch.Tensor
    ) -> tuple[dict[str, Any], list[int]]:
        """Position of the likeliest of ``letter_ids`` after each prompt."""
        result, values = self._timed(
            batches, warm, lambda moved: self.forward(moved, "last_logprobs", letter_ids)
        )
        return result, values.argmax(-1).tolist()

    def _timed(self, batches: Sequence[Batch], warm: int, score: Any) -> tuple[dict[str, Any], torch.Tensor]:
        outputs = []
        for batch in batches[:warm]:
            outputs.append(score(self.mover(batch)))
        _restart(self.device)
        began = time.perf_counter()
        for batch in batches[warm:]:
            outputs.append(score(self.mover(batch)))
        values = torch.cat(outputs).float().cpu()
        seconds = time.perf_counter() - began
        counted = batches[warm:]
        samples = sum(len(batch["lengths"]) for batch in counted)
        tokens = sum(int(batch["lengths"].sum()) for batch in counted)
        return _finish(seconds, samples, tokens, self.device), values


def _restart(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
