"""The validation samples of a TMDB, through the same split, processor and length rule as the training."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odb_workflow.processing.dataset import SampleDataset
from odb_workflow.processing.identity import processor_identity
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.accepted import VALIDATION_NAME, AcceptedSet
from odb_workflow.tmdb.store import RecordStore
from odb_workflow.tmdb.validate import validate_tmdb

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
    """Open the TMDB and choose the validation rows; the TMDB is validated first where that has not been done.

    Raises:
        UserError: the TMDB or its validation cannot be read, they do not belong together, or the split is
            empty. On rank 0; the other ranks end quietly.
    """
    folder = arguments.validation or session.ranks.main_only(
        lambda: str(_validated(arguments, session, processor))
    )
    pixel_dtype = session.performance.pixel_dtype(session.precision)
    return session.ranks.together(lambda: _open(arguments, folder, processor, pixel_dtype))


def _validated(arguments: argparse.Namespace, session: Session, processor: Any) -> Path:
    """Validate the TMDB into the results folder, unless an earlier run of this command did."""
    folder = session.folder / "tmdb_validation"
    if (folder / VALIDATION_NAME).is_file():
        accepted, store = AcceptedSet.load(folder), RecordStore(arguments.data)
        same = (accepted.info["records_sha256"], accepted.info["max_length"], accepted.info["processor"])
        if same == (store.sha256, arguments.max_length, processor_identity(processor)):
            return folder
    logger.info("no --validation given: the dataset is validated into %s", folder)
    validate_tmdb(arguments.data, processor, max_length=arguments.max_length, output_dir=folder)
    return folder


def _open(
    arguments: argparse.Namespace, folder: str, processor: Any, pixel_dtype: torch.dtype | None
) -> ValidationData:
    store = RecordStore(arguments.data)
    accepted = AcceptedSet.load(folder)
    accepted.check_store(store)
    if accepted.info["max_length"] != arguments.max_length:
        raise UserError(
            f"--max-length is {arguments.max_length}, the dataset was validated with "
            f"{accepted.info['max_length']}",
            where=folder,
            fix="give the same --max-length, or validate the dataset again",
        )
    identity = processor_identity(processor)
    if accepted.info["processor"] != identity:
        logger.warning("the dataset was validated with another processor than this checkpoint's: %s", folder)
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
    sample_processor = SampleProcessor(
        processor, arguments.max_length, arguments.data, pixel_dtype=pixel_dtype
    )
    ids = [str(name) for name in accepted.ids[places]]
    return ValidationData(
        items=ValidationItems(SampleDataset(store, rows, sample_processor), ids),
        rows=rows,
        ids=ids,
        sources=[str(name) for name in accepted.sources[places]],
        lengths=[int(length) for length in accepted.lengths[places]],
        settings={
            "data_checksum": accepted.data_checksum,
            "processor_sha256": identity["sha256"],
            "split_mode": arguments.split_mode,
            "val_size": arguments.val_size,
            "val_start": arguments.val_start,
            "split_seed": arguments.split_seed,
            "max_samples": arguments.max_samples,
            "max_length": arguments.max_length,
            "image_max_pixels": arguments.image_max_pixels,
        },
    )
