"""The dataset over accepted rows: the order asked for, forked workers, faults that name the record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from odb_workflow.processing.dataset import SampleDataset
from odb_workflow.processing.sample import SampleProcessor
from odb_workflow.tmdb.records import BadRecord
from odb_workflow.tmdb.store import RecordStore
from tmdb_helpers import cached_processor, record, write_tmdb
from torch.utils.data import DataLoader


@pytest.fixture
def dataset(tmp_path: Path, tiny_model_dir: Path) -> SampleDataset:
    turns = [("human", "q"), ("gpt", "a")]
    records = [record(n, n % 2, None if n % 2 else turns) for n in range(20)]
    store = RecordStore(write_tmdb(tmp_path / "d", records))
    samples = SampleProcessor(cached_processor(tiny_model_dir), 4096, tmp_path / "d")
    return SampleDataset(store, [5, 0, 19, 7], samples)


def test_rows_in_the_order_asked_for(dataset: SampleDataset) -> None:
    assert len(dataset) == 4
    assert [dataset[index]["row"] for index in range(4)] == [5, 0, 19, 7]
    assert "pixel_values" in dataset[0] and "pixel_values" not in dataset[1]
    assert not hasattr(dataset, "__getitems__")  # ODB logs ids only without it


def test_forked_workers_give_the_same_samples(dataset: SampleDataset) -> None:
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    read = list(loader)
    for index, sample in enumerate(read):
        expected = dataset[index]
        assert sample.keys() == expected.keys()
        assert all(
            torch.equal(value, expected[key]) if torch.is_tensor(value) else value == expected[key]
            for key, value in sample.items()
        )


def test_a_fault_in_a_worker_names_the_record(dataset: SampleDataset) -> None:
    (dataset.store.data_dir / "images" / "ok.png").write_bytes(b"gone")
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(BadRecord) as caught:
        list(loader)
    assert "r-00005" in str(caught.value) and "images/ok.png" in str(caught.value)
