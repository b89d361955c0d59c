"""The training samples of a run: rows, lengths, label tokens, the dataset."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..processing.dataset import SampleDataset
from ..processing.sample import SampleProcessor
from ..runtime.errors import UserError
from ..tmdb.accepted import AcceptedSet
from ..tmdb.split import Split
from ..tmdb.store import RecordStore
from .arguments import require_directory

logger = logging.getLogger(__name__)


@dataclass
class TrainingData:
    """What is trained on; position i (0..n-1) is row ``rows[i]`` of ``records.jsonl``.

    Attributes:
        rows: int64 [n], in training order.
        lengths: int64 [n] tokens; ``label_tokens``: int64 [n].
        dataset: map-style, by position.
    """

    accepted: AcceptedSet
    split: Split
    rows: np.ndarray
    lengths: np.ndarray
    label_tokens: np.ndarray
    dataset: SampleDataset

    def names(self, rows: np.ndarray) -> list[str]:
        """``id (source)`` of rows."""
        where = self.accepted.positions(np.asarray(rows))
        return [f"{self.accepted.ids[i]} ({self.accepted.sources[i]})" for i in where]


def load_training_data(
    args: argparse.Namespace, processor: Any, pixel_dtype: torch.dtype | None = None
) -> TrainingData:
    """Open the TMDB and the result of its validation, and split it.

    Raises:
        UserError: data missing, validation missing or of other data, nothing to train on, or samples without
            label tokens.
    """
    require_directory(args.data, "the TMDB", "run `snakemake data`, or give --data DIR")
    store = RecordStore(args.data)
    accepted = AcceptedSet.load(args.validation)
    accepted.check_store(store)
    accepted.check_processor(processor, args.max_length)
    split = accepted.split(args.split_mode, args.val_size, args.split_seed, args.train_size, args.val_start)
    rows = accepted.training_rows(split)
    where = accepted.positions(rows)
    sample_processor = SampleProcessor(processor, args.max_length, args.data, pixel_dtype=pixel_dtype)
    data = TrainingData(
        accepted=accepted,
        split=split,
        rows=rows,
        lengths=accepted.lengths[where].astype(np.int64),
        label_tokens=accepted.label_tokens[where].astype(np.int64),
        dataset=SampleDataset(store, rows, sample_processor),
    )
    mute = rows[data.label_tokens == 0]
    if len(mute):
        raise UserError(
            f"{len(mute)} training samples have no label tokens",
            where="records " + ", ".join(data.names(mute[:10])),
            fix="drop these records, or raise --max-length so that their answers are not cut off",
        )
    if args.loader in ("odb", "token_budget") and args.token_budget < data.lengths.max():
        longer = int((data.lengths > args.token_budget).sum())
        logger.warning(
            "token budget %d is below the longest sample (%d tokens): %d samples are batches of their own",
            args.token_budget,
            data.lengths.max(),
            longer,
        )
    return data
