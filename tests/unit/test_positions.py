"""Host positions equal what transformers computes on the device, to the last integer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from odb_workflow.loaders.collate import Collator
from odb_workflow.model.positions import cumulative_lengths, mrope_positions, vision_tables
from tiny_qwen3_vl import make_sample, tiny_model
from transformers import vision_utils


def test_positions_by_hand() -> None:
    # two text tokens, an image of 2 x 3 merged patches, one text token
    types = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0])
    positions = mrope_positions(types, [(1, 4, 6)], 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_positions_equal_get_rope_index_on_random_samples() -> None:
    model = tiny_model()
    chance = random.Random(5)
    samples = []
    for row in range(40):
        grids = [(1, 2 * chance.randint(1, 9), 2 * chance.randint(1, 9)) for _ in range(chance.randint(0, 4))]
        samples.append(make_sample(row, chance.randint(1, 50), grids))
    batch = Collator.from_config(model.config, 0)(samples)
    expected, _ = model.model.get_rope_index(
        batch["input_ids"],
        mm_token_type_ids=batch["mm_token_type_ids"],
        image_grid_thw=batch["image_grid_thw"],
        attention_mask=batch["attention_mask"],
    )
    assert torch.equal(batch["position_ids"], expected)

    packed = Collator.from_config(model.config, 0, "pack")(samples)["position_ids"]
    rows = [expected[:, n, : len(sample["input_ids"])] for n, sample in enumerate(samples)]
    assert torch.equal(packed[:, 0], torch.cat(rows, dim=1))


@pytest.mark.parametrize(
    ("types", "grids", "message"),
    [
        ([0, 1, 1, 0], [(1, 4, 4)], "2 image tokens in a row"),
        ([0, 1, 0], [], "more runs of image tokens than images"),
        ([0, 0], [(1, 2, 2)], "fewer runs of image tokens than images"),
    ],
)
def test_positions_that_do_not_fit_are_refused(types: list, grids: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mrope_positions(np.array(types), grids, 2)


def test_vision_tables_equal_transformers() -> None:
    grid = torch.tensor([[1, 4, 6], [1, 8, 2], [2, 4, 4]])
    tables = vision_tables(grid, grid_side=8, spatial_merge_size=2)
    assert tables["vision_segment_lengths"] == (24, 16, 16, 16)
    assert tables["vision_max_seqlen"] == 24
    assert torch.equal(tables["vision_cu_seqlens"], vision_utils.get_vision_cu_seqlens(grid))
    assert tables["vision_cu_seqlens"].dtype == torch.int32
    assert torch.equal(tables["vision_position_ids"], vision_utils.get_vision_position_ids(grid, 2))
    assert tables["vision_interp_weights"].sum(1).allclose(torch.ones(72))


def test_cumulative_lengths() -> None:
    assert cumulative_lengths([3, 1, 5]).tolist() == [0, 3, 4, 9]
