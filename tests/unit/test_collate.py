"""Batches: padded and packed rows, label bookkeeping, what passes through."""

from __future__ import annotations

import pickle

import pytest
import torch
from odb_workflow.loaders.collate import ODB_TRANSPORT_KEYS, Collator, unpack_batch
from tiny_qwen3_vl import IMAGE, PAD, SAMPLES, make_sample, tiny_config

CONFIG = tiny_config()


def test_padded_batch() -> None:
    samples = [make_sample(4, 3, labels=2), make_sample(9, 1, [(1, 2, 4)], labels=0)]
    batch = Collator.from_config(CONFIG, PAD)(samples)
    assert batch["rows"].tolist() == [4, 9]
    assert batch["lengths"].tolist() == [5, 7]
    assert batch["label_counts"].tolist() == [2, 0]
    assert batch["input_ids"].shape == (2, 7)
    assert batch["input_ids"][0, 5:].tolist() == [PAD, PAD]
    assert batch["labels"][0].tolist() == [-100, -100, -100, *samples[0]["labels"][3:].tolist(), -100, -100]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert batch["position_ids"].shape == (3, 2, 7)
    assert batch["label_positions"].tolist() == [2, 3]
    assert batch["label_targets"].tolist() == samples[0]["labels"][3:].tolist()
    assert batch["label_samples"].tolist() == [0, 0]
    assert batch["last_positions"].tolist() == [4, 13]
    assert batch["image_positions"].tolist() == [10, 11]
    assert batch["text_positions"].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 12, 13]
    assert batch["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert batch["pixel_values"].shape == (8, 96)
    assert "cu_seqlens" not in batch
    assert batch["lengths"].tolist() == [5, 7]


def test_packed_batch() -> None:
    samples = SAMPLES["several"]
    batch = Collator.from_config(CONFIG, PAD, "pack")(samples)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert batch["input_ids"].shape == (1, sum(lengths))
    assert batch["cu_seqlens"].tolist() == [0, lengths[0], lengths[0] + lengths[1], sum(lengths)]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == max(lengths)
    assert batch["segment_lengths"] == tuple(lengths)
    assert batch["lengths"].tolist() == lengths
    # no label of a sample is predicted by the last token of the sample before
    assert batch["label_counts"].tolist() == [6, 15, 7]
    assert not set(batch["label_positions"].tolist()) & set(batch["last_positions"].tolist())


def test_first_token_with_a_label_is_not_counted() -> None:
    sample = make_sample(0, 4, labels=6)
    assert (sample["labels"] != -100).sum() == 6
    batch = Collator.from_config(CONFIG, PAD)([sample, sample])
    assert batch["label_counts"].tolist() == [5, 5]
    assert len(batch["label_targets"]) == 10


def test_unpacking_gives_the_padded_batch() -> None:
    padded = Collator.from_config(CONFIG, PAD)(SAMPLES["several"])
    unpacked = unpack_batch(Collator.from_config(CONFIG, PAD, "pack")(SAMPLES["several"]), PAD)
    for name, value in unpacked.items():
        assert torch.equal(value, padded[name]), name


def test_pixels_travel_in_the_type_asked_for() -> None:
    batch = Collator.from_config(CONFIG, PAD, pixel_dtype=torch.bfloat16)(SAMPLES["image"])
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert torch.equal(batch["pixel_values"][:16], SAMPLES["image"][0]["pixel_values"].bfloat16())


def test_transport_keys_of_odb_pass_through() -> None:
    constants = pytest.importorskip("odb.constants")
    assert set(ODB_TRANSPORT_KEYS) == {constants.TOTAL_BATCH_SIZE_KEY, constants.TOTAL_TOKENS_KEY}
    samples = [{**sample, "total_batch_size": 7, "odb_total_tokens": 99} for sample in SAMPLES["text"]]
    batch = Collator.from_config(CONFIG, PAD)(samples)
    assert (batch["total_batch_size"], batch["odb_total_tokens"]) == (7, 99)


def test_batch_without_images_has_no_image_keys() -> None:
    batch = Collator.from_config(CONFIG, PAD)(SAMPLES["text"])
    assert not [name for name in batch if "pixel" in name or "grid" in name or name.startswith("vision")]


def test_collator_survives_pickling() -> None:
    collator = pickle.loads(pickle.dumps(Collator.from_config(CONFIG, PAD, "pack")))
    assert collator(SAMPLES["one"])["input_ids"].shape == (1, 30)


def test_samples_that_contradict_themselves_are_named() -> None:
    collator = Collator.from_config(CONFIG, PAD)
    wrong_grid = {**SAMPLES["one"][0], "image_grid_thw": torch.tensor([[1, 6, 4]])}
    with pytest.raises(ValueError, match="record row 12: 9 image tokens in a row"):
        collator([wrong_grid])
    stray = {**SAMPLES["text"][0], "input_ids": SAMPLES["text"][0]["input_ids"].clone()}
    stray["input_ids"][3] = IMAGE
    with pytest.raises(ValueError, match="record row 0: mm_token_type_ids"):
        collator([stray])


def test_unknown_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="'pad' or 'pack'"):
        Collator(PAD, IMAGE, 2, padding="left")


def test_without_host_metadata_samples_of_other_models_collate() -> None:
    sample = {name: value for name, value in SAMPLES["one"][0].items() if name != "image_grid_thw"}
    batch = Collator.from_config(CONFIG, PAD, host_metadata=False)([sample])
    assert "label_positions" not in batch
    assert "pixel_values" in batch
