"""A sample as the model sees it, for a person: what is text, what is image, what is learned, and is it
sound."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..tmdb.records import Record
from .sample import IGNORE_INDEX, Sample, SampleProcessor
from .vision import VisionSettings


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens of one kind: ``text``, ``label`` or ``image``; an image run has no text."""

    kind: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """One inspected sample; ``problems`` is empty where all checks passed."""

    record: Record
    row: int
    tokens: int
    label_tokens: int
    image_tokens: int
    patches: int
    pieces: tuple[Piece, ...]
    pictures: tuple[Image.Image, ...]
    problems: tuple[str, ...]


def check_sample(sample: Sample, record: Record, image_token_id: int, merge_size: int | None) -> list[str]:
    """What is wrong with a sample; an empty list where it is sound.

    Checks: no vision token carries a label; a record with images has its vision tensors and one without has
    none; image tokens, their marks and the grid agree; something is supervised; labels repeat the input.
    """
    problems = []
    ids, labels, marks = sample["input_ids"], sample["labels"], sample["mm_token_type_ids"]
    is_image = ids == image_token_id
    labeled = labels != IGNORE_INDEX
    wrong = int((labeled & (is_image | (marks != 0))).sum())
    if wrong:
        problems.append(f"{wrong} vision tokens carry a label")
    if not torch.equal(is_image, marks != 0):
        problems.append("mm_token_type_ids do not mark exactly the image tokens")
    pixels, grid = sample.get("pixel_values"), sample.get("image_grid_thw")
    if record.images and (pixels is None or len(pixels) == 0):
        problems.append(f"the record has {len(record.images)} images, the sample has no vision tensor")
    if not record.images and (pixels is not None or bool(is_image.any())):
        problems.append("the record has no image, the sample has vision tensors or image tokens")
    if grid is not None and pixels is not None:
        patches = grid.prod(dim=1)
        if len(grid) != len(record.images) or int(patches.sum()) != len(pixels):
            problems.append(
                f"{len(grid)} grids of {int(patches.sum())} patches, {len(pixels)} rows of pixels"
            )
        elif merge_size and int(patches.sum()) // merge_size**2 != int(is_image.sum()):
            problems.append(f"{int(is_image.sum())} image tokens for {int(patches.sum())} patches")
    if int(labeled[1:].sum()) == 0:
        problems.append("no token is supervised")
    if not torch.equal(labels[labeled], ids[labeled]):
        problems.append("labels differ from the tokens they stand on")
    return problems


def pieces_of(sample: Sample, tokenizer: Any) -> tuple[Piece, ...]:
    """The sample as runs of plain text, supervised text and image tokens."""
    ids = sample["input_ids"].numpy()
    kinds = np.where(sample["labels"].numpy() != IGNORE_INDEX, 1, 0)
    kinds[sample["mm_token_type_ids"].numpy() != 0] = 2
    cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(ids)]
    pieces = []
    for start, stop in itertools.pairwise(cuts):
        kind = ("text", "label", "image")[kinds[start]]
        text = "" if kind == "image" else tokenizer.decode(ids[start:stop].tolist())
        pieces.append(Piece(kind, text, stop - start))
    return tuple(pieces)


def pictures_of(sample: Sample, settings: VisionSettings | None) -> tuple[Image.Image, ...]:
    """The pictures back from ``pixel_values``: resized and oriented as the model sees them."""
    if settings is None or "pixel_values" not in sample:
        return ()
    patch, merge = settings.patch_size, settings.merge_size
    mean = torch.tensor(settings.mean).view(3, 1, 1)
    std = torch.tensor(settings.std).view(3, 1, 1)
    pictures, start = [], 0
    for _, rows, columns in sample["image_grid_thw"].tolist():
        block = sample["pixel_values"][start : start + rows * columns].float()
        start += rows * columns
        block = block.view(-1, 3, settings.temporal_patch_size, patch, patch)[:, :, 0]
        block = block.view(rows // merge, columns // merge, merge, merge, 3, patch, patch)
        pixels = block.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
        pixels = (pixels * std + mean) / settings.rescale_factor
        array = pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
        pictures.append(Image.fromarray(array))
    return tuple(pictures)


def inspect_sample(samples: SampleProcessor, record: Record, row: int) -> Inspection:
    """Process one record and look at the result.

    Raises:
        BadRecord: the record cannot become a sample.
    """
    sample = samples(record, row)
    merge = samples.vision.merge_size if samples.vision else None
    return Inspection(
        record=record,
        row=row,
        tokens=len(sample["input_ids"]),
        label_tokens=int((sample["labels"][1:] != IGNORE_INDEX).sum()),
        image_tokens=int((sample["mm_token_type_ids"] != 0).sum()),
        patches=len(sample["pixel_values"]) if "pixel_values" in sample else 0,
        pieces=pieces_of(sample, samples.processor.tokenizer),
        pictures=pictures_of(sample, samples.vision),
        problems=tuple(check_sample(sample, record, samples.image_token_id, merge)),
    )
