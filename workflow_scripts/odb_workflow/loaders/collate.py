"""Samples to one batch: padded rows, or all samples packed into one row.

Besides the tensors of the model, a batch carries what a forward pass would otherwise have to ask the GPU for:
mRoPE positions, where image and label tokens lie, and the vision tower's tables. See :class:`Collator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from ..model.positions import cumulative_lengths, mrope_positions, vision_tables
from ..processing.sample import IGNORE_INDEX

# Metadata that odb sets on every sample of a group and expects back in the batch (odb.constants; kept as text
# so that evaluation runs where odb is not installed; a test compares them).
ODB_TRANSPORT_KEYS = ("total_batch_size", "odb_total_tokens")

Sample = dict[str, Any]
Batch = dict[str, Any]


class Collator:
    """Build a batch of N samples with B rows of L tokens (padded: B = N; packed: B = 1).

    Keys of the batch, all on the host:

    ``rows`` int64 [N], ``lengths`` int64 [N] real tokens, ``label_counts`` int64 [N] label tokens of the
    next-token loss, ``input_ids``, ``labels`` (unshifted, -100 elsewhere), ``attention_mask``,
    ``mm_token_type_ids`` int64 [B, L], ``position_ids`` int64 [3, B, L]; with images ``pixel_values`` [P, D]
    and ``image_grid_thw`` int64 [n, 3]; packed also ``cu_seqlens`` int32 [N+1] and ``max_seqlen`` int.

    With ``host_metadata``, positions in the flattened [B * L] tokens:
    ``text_positions`` int64 (real tokens that are not image tokens), ``image_positions`` int64,
    ``label_positions`` int64 [K] (the token that predicts label k), ``label_targets`` int64 [K],
    ``label_samples`` int64 [K] (which sample, 0..N-1), ``last_positions`` int64 [N]; ``segment_lengths``
    tuple of N ints (packed only), and the keys of :func:`odb_workflow.model.positions.vision_tables`.

    odb's transport keys are copied from the first sample.

    Args:
        pad_token_id: Filler of ``input_ids`` to the right of a sample.
        image_token_id: The token that stands for one merged patch.
        spatial_merge_size: Patches per side that become one image token.
        padding: ``pad`` rows to the longest sample, or ``pack`` all samples end to end in one row.
        pixel_dtype: Type of ``pixel_values``; bfloat16 halves what goes through the worker's queue. None
            keeps it.
        host_metadata: Also compute what the fast forward needs.
        position_grid_side: Side of the vision tower's learned position table; None leaves its interpolation
            to the device.
    """

    def __init__(
        self,
        pad_token_id: int,
        image_token_id: int,
        spatial_merge_size: int,
        padding: Literal["pad", "pack"] = "pad",
        pixel_dtype: torch.dtype | None = None,
        host_metadata: bool = True,
        position_grid_side: int | None = None,
    ) -> None:
        if padding not in ("pad", "pack"):
            raise ValueError(f"padding is {padding!r}; it must be 'pad' or 'pack'")
        self.pad_token_id = pad_token_id
        self.image_token_id = image_token_id
        self.spatial_merge_size = spatial_merge_size
        self.padding = padding
        self.pixel_dtype = pixel_dtype
        self.host_metadata = host_metadata
        self.position_grid_side = position_grid_side

    @classmethod
    def from_config(
        cls,
        config: Any,
        pad_token_id: int,
        padding: Literal["pad", "pack"] = "pad",
        pixel_dtype: torch.dtype | None = None,
        host_metadata: bool = True,
    ) -> Collator:
        """A collator for a model configuration (``model.config``).

        Of a model other than Qwen's family, pass ``host_metadata=False``: its samples need no image grids.
        """
        vision = getattr(config, "vision_config", None)
        table = getattr(vision, "num_position_embeddings", None)
        image_token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        return cls(
            pad_token_id,
            -1 if image_token is None else int(image_token),
            getattr(vision, "spatial_merge_size", 1),
            padding=padding,
            pixel_dtype=pixel_dtype,
            host_metadata=host_metadata,
            position_grid_side=int(table**0.5) if table else None,
        )

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collate ``samples`` (at least one, each with at least one token) into one batch.

        Raises:
            ValueError: image tokens and image grids of a sample disagree; the message names its row.
        """
        lengths = [int(sample["input_ids"].shape[0]) for sample in samples]
        packed = self.padding == "pack"
        width = sum(lengths) if packed else max(lengths)
        height = 1 if packed else len(samples)
        starts = np.cumsum([0, *lengths[:-1]]) if packed else np.arange(len(samples)) * width
        tokens = height * width

        input_ids = np.full(tokens, self.pad_token_id, dtype=np.int64)
        labels = np.full(tokens, IGNORE_INDEX, dtype=np.int64)
        mask = np.zeros(tokens, dtype=np.int64)
        types = np.zeros(tokens, dtype=np.int64)
        positions = np.zeros((3, tokens), dtype=np.int64)
        label_at, label_of, label_counts = [], [], []
        for number, (sample, start, length) in enumerate(zip(samples, starts.tolist(), lengths, strict=True)):
            span = slice(start, start + length)
            input_ids[span] = _array(sample["input_ids"])
            labels[span] = _array(sample["labels"])
            mask[span] = 1
            types[span] = _array(sample["mm_token_type_ids"])
            positions[:, span] = self._positions(sample, types[span], input_ids[span])
            predicted = np.flatnonzero(labels[start + 1 : start + length] != IGNORE_INDEX)
            label_at.append(predicted + start)
            label_of.append(np.full(len(predicted), number, dtype=np.int64))
            label_counts.append(len(predicted))

        batch: Batch = {
            "rows": torch.tensor([int(sample["row"]) for sample in samples], dtype=torch.int64),
            "lengths": torch.tensor(lengths, dtype=torch.int64),
            "label_counts": torch.tensor(label_counts, dtype=torch.int64),
            "input_ids": torch.from_numpy(input_ids).view(height, width),
            "labels": torch.from_numpy(labels).view(height, width),
            "attention_mask": torch.from_numpy(mask).view(height, width),
            "mm_token_type_ids": torch.from_numpy(types).view(height, width),
            "position_ids": torch.from_numpy(positions).view(3, height, width),
        }
        images = [sample for sample in samples if sample.get("pixel_values") is not None]
        if images:
            pixels = torch.cat([sample["pixel_values"] for sample in images])
            batch["pixel_values"] = pixels if self.pixel_dtype is None else pixels.to(self.pixel_dtype)
        gridded = [sample["image_grid_thw"] for sample in images if "image_grid_thw" in sample]
        if gridded:
            batch["image_grid_thw"] = torch.cat(gridded)
        if packed:
            batch["cu_seqlens"] = cumulative_lengths(lengths)
            batch["max_seqlen"] = max(lengths)
        if self.host_metadata:
            predicting = np.concatenate(label_at)
            batch["text_positions"] = torch.from_numpy(np.flatnonzero((mask == 1) & (types == 0)))
            batch["image_positions"] = torch.from_numpy(np.flatnonzero(types == 1))
            batch["label_positions"] = torch.from_numpy(predicting)
            batch["label_targets"] = torch.from_numpy(labels[predicting + 1])
            batch["label_samples"] = torch.from_numpy(np.concatenate(label_of))
            batch["last_positions"] = torch.from_numpy(starts + np.asarray(lengths) - 1)
            if packed:
                batch["segment_lengths"] = tuple(lengths)
            if gridded:
                batch |= vision_tables(
                    batch["image_grid_thw"], self.position_grid_side, self.spatial_merge_size
                )
        for key in ODB_TRANSPORT_KEYS:
            if key in samples[0]:
                batch[key] = samples[0][key]
        return batch

    def _positions(self, sample: Sample, types: np.ndarray, input_ids: np.ndarray) -> np.ndarray:
        grids = sample.get("image_grid_thw")
        if grids is None and not self.host_metadata:
            return np.broadcast_to(np.arange(len(types)), (3, len(types)))
        grids = [] if grids is None else grids.tolist()
        try:
            if not np.array_equal(types == 1, input_ids == self.image_token_id):
                raise ValueError("mm_token_type_ids and the image tokens of input_ids differ")
            return mrope_positions(types, grids, self.spatial_merge_size)
        except ValueError as error:
            raise ValueError(f"record row {int(sample['row'])}: {error}") from None


def _array(values: torch.Tensor) -> np.ndarray:
    return values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def unpack_batch(batch: Batch, pad_token_id: int) -> Batch:
    """A packed batch as padded rows, for a forward that knows no packing; the model's tensors only."""
    lengths = batch["lengths"].tolist()
    rows = torch.nn.utils.rnn.pad_sequence

    def split(name: str, fill: int) -> torch.Tensor:
        return rows(batch[name][0].split(lengths), batch_first=True, padding_value=fill)

    padded = {
        "rows": batch["rows"],
        "lengths": batch["lengths"],
        "label_counts": batch["label_counts"],
        "input_ids": split("input_ids", pad_token_id),
        "labels": split("labels", IGNORE_INDEX),
        "attention_mask": split("attention_mask", 0),
        "mm_token_type_ids": split("mm_token_type_ids", 0),
        "position_ids": rows(
            batch["position_ids"][:, 0].T.split(lengths), batch_first=True, padding_value=0
        ).permute(2, 0, 1),
    }
    for name in ("pixel_values", "image_grid_thw"):
        if name in batch:
            padded[name] = batch[name]
    return padded
