"""Validation loss: the model's loss of every validation sample, and its means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from odb_workflow.runtime.errors import UserError

FOLDER = "eval_out_accelerate_valloss"


class ValidationItems:
    """Validation samples in validation order, each named by its record id."""

    def __init__(self, dataset: Any, ids: Sequence[str]) -> None:
        self.dataset, self.ids = dataset, [str(name) for name in ids]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset[index]

    def key(self, index: int) -> str:
        """The record id."""
        return self.ids[index]


def loss_scorer(forward: Any) -> Any:
    """A scorer that gives [sum of token losses in nat, number of label tokens] per sample."""

    def score(batch: dict[str, Any]) -> list[list[float]]:
        sums = forward(batch, mode="sample_losses").double().cpu()
        return torch.stack([sums, batch["label_counts"].double().cpu()], dim=1).tolist()

    return score


def per_sample_rows(
    ids: Sequence[str], rows: Sequence[int], sources: Sequence[str], values: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """The lines of ``per_sample_losses.jsonl``, in validation order.

    Args:
        values: By id: sum of token losses in nat, and number of label tokens.

    Raises:
        UserError: a sample has no label token, so its loss is not defined.
    """
    lines = []
    for name, row, source in zip(ids, rows, sources, strict=True):
        loss_sum, label_tokens = values[str(name)]
        if label_tokens < 1:
            raise UserError(
                "a validation sample has no label token, its loss is not defined",
                where=f"sample {name}, row {row}",
                fix="validate the dataset again with the same max_length",
            )
        lines.append(
            {
                "id": str(name),
                "row": int(row),
                "source": str(source),
                "label_tokens": int(label_tokens),
                "loss": loss_sum / label_tokens,
            }
        )
    return lines


def summarize_losses(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the lines of ``per_sample_losses.jsonl``, exact whatever their order.

    Returns:
        ``eval_loss`` (mean over samples of the model loss), its standard error, ``token_weighted_eval_loss``
        (mean over label tokens), counts, and the same per source.
    """
    sources = sorted({line["source"] for line in lines})
    return {
        **_means(lines),
        "loss_aggregation": "sample_mean_of_model_loss",
        "label_tokens_per_sample": quantiles([line["label_tokens"] for line in lines]),
        "per_source": {name: _means([line for line in lines if line["source"] == name]) for name in sources},
    }


def _means(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    losses = [line["loss"] for line in lines]
    tokens = sum(line["label_tokens"] for line in lines)
    # fsum rounds once, at the end: no order of ranks or batches shows in the digits.
    mean = math.fsum(losses) / len(losses)
    weighted = math.fsum(line["loss"] * line["label_tokens"] for line in lines) / tokens
    error = None
    if len(losses) > 1:
        variance = math.fsum((loss - mean) ** 2 for loss in losses) / (len(losses) - 1)
        error = math.sqrt(variance / len(losses))
    return {
        "eval_loss": mean,
        "eval_loss_standard_error": error,
        "token_weighted_eval_loss": weighted,
        "eval_samples": len(losses),
        "label_tokens": tokens,
    }


def quantiles(values: Sequence[int]) -> dict[str, float | int]:
    """Least, 10 %, median, 90 %, greatest (all of them values that occur) and mean."""
    ordered = np.sort(np.asarray(values))
    places = np.rint((len(ordered) - 1) * np.array([0.0, 0.1, 0.5, 0.9, 1.0])).astype(int)
    names = ("min", "p10", "p50", "p90", "max")
    return {
        **{name: int(ordered[place]) for name, place in zip(names, places, strict=True)},
        "mean": float(ordered.mean()),
    }
