"""The validation samples of a TMDB, through the same split, processor and length rule as the training."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odb_workflow.processing.dataset import SampleDataset
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.tmdb.accepted import AcceptedSet
from odb_workflow.tmdb.store import RecordStore

from .session import Session
from .valloss import ValidationItems

logger = logging.getLogger(__name__)


@dataclass
class ValidationData:
    """Validation samples in validation order.

    Attributes:
        lengths: Tokens of each sample as the validation of the TMDB measured them; they only shape the
            batches.
        settings: What of the data decides the losses.
    """

    items: ValidationItems
    rows: np.ndarray
    ids: Sequence[str]
    sources: Sequence[str]
    lengths: list[int]
    settings: dict[str, Any]


def load(arguments: argparse.Namespace, session: Session, processor: Any) -> ValidationData:
    """Open the TMDB and choose the validation rows.

    Raises:
        UserError: the TMDB or its validation cannot be read, they do not belong together, or the split is
            empty.
    """
    store = RecordStore(arguments.data)
    accepted = AcceptedSet.load(arguments.validation)
    accepted.check_store(store)
    split = accepted.split(
        mode=arguments.split_mode,
        val_size=arguments.val_size,
        split_seed=arguments.split_seed,
        val_start=arguments.val_start,
    )
    rows = accepted.validation_rows(split)
    if arguments.max_samples > 0:
        rows = rows[: arguments.max_samples]
    places = accepted.positions(rows)
    sample_processor = SampleProcessor(processor, arguments.max_length, arguments.data)
    ids = [str(name) for name in accepted.ids[places]]
    return ValidationData(
        items=ValidationItems(SampleDataset(store, rows, sample_processor), ids),
        rows=rows,
        ids=ids,
        sources=[str(name) for name in accepted.sources[places]],
        lengths=[int(length) for length in accepted.lengths[places]],
        settings={
            "data_checksum": accepted.data_checksum,
            "split_mode": arguments.split_mode,
            "val_size": arguments.val_size if arguments.split_mode != "tail" else None,
            "val_start": arguments.val_start if arguments.split_mode == "tail" else None,
            "split_seed": arguments.split_seed
            if arguments.split_mode in ("lf_val_size", "grouped")
            else None,
            "max_samples": arguments.max_samples,
            "max_length": arguments.max_length,
            "image_max_pixels": arguments.image_max_pixels,
        },
    )


def default_validation(output: Path) -> Path:
    """Where a TMDB is validated when no ``--validation`` is given."""
    return output / "tmdb_validation"
