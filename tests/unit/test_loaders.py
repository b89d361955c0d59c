"""Samplers over lengths, the way of samples between processes, and odb itself in one process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import odb
import pytest
import torch
from odb_workflow.loaders.epoch_plan import (
    epoch_lengths,
    epoch_positions,
    padded_positions,
    rank_shard,
    remaining_positions,
)
from odb_workflow.loaders.factory import (
    LoaderSettings,
    build_epoch_loader,
    check_loader_settings,
    planned_duplicates,
)
from odb_workflow.loaders.length_grouped import length_grouped_batches
from odb_workflow.loaders.standard import fixed_batches
from odb_workflow.loaders.token_budget import token_budget_batches
from odb_workflow.loaders.transport import Parcel, ParcelDataset
from odb_workflow.runtime.errors import UserError

LENGTHS = np.random.default_rng(0).integers(5, 200, 211)
ORDER = epoch_positions(len(LENGTHS), seed=3, epoch=0)


class Dataset:
    """Samples that hold nothing but their length."""

    def __init__(self, lengths: np.ndarray, delay: float = 0.0) -> None:
        self.lengths, self.delay = lengths, delay

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> dict:
        time.sleep(self.delay)
        return {"row": position, "input_ids": torch.zeros(int(self.lengths[position]), dtype=torch.int64)}


def collate(samples: list[dict]) -> dict:
    batch = {"rows": torch.tensor([sample["row"] for sample in samples])}
    batch["input_ids"] = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    return batch | {
        key: samples[0][key] for key in ("total_batch_size", "odb_total_tokens") if key in samples[0]
    }


def collate_without_metadata(samples: list[dict]) -> dict:
    return {key: value for key, value in collate(samples).items() if key in ("rows", "input_ids")}


def loader(settings: LoaderSettings, positions: np.ndarray = ORDER, collate=collate, dataset=None, **changes):
    place = {"epoch": 0, "segment": 0, "rank": 0, "world_size": 1} | changes
    return build_epoch_loader(settings, dataset or Dataset(LENGTHS), collate, positions, LENGTHS, **place)


ODB = LoaderSettings(
    "odb", token_budget=600, buffer_size=64, no_warmup=True, num_workers=2, prefetch_factor=32, seed=1
)


# plans


def test_epochs_are_permutations_that_differ() -> None:
    first, second = (epoch_positions(50, 42, epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()
    assert first.tolist() == epoch_positions(50, 42, 0).tolist()


@pytest.mark.parametrize(
    ("epochs", "right"), [(1.0, [10]), (2.5, [10, 10, 5]), (0.25, [2]), (0.001, [1]), (3, [10, 10, 10])]
)
def test_fractions_of_epochs(epochs: float, right: list[int]) -> None:
    assert epoch_lengths(10, epochs) == right


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shards_are_equally_long_and_cover_all(world: int) -> None:
    shards = [rank_shard(ORDER, world, rank) for rank in range(world)]
    assert {len(shard) for shard in shards} == {-(-len(ORDER) // world)}
    surplus = Counter(position for shard in shards for position in shard) - Counter(ORDER.tolist())
    assert sorted(surplus.elements()) == sorted(padded_positions(ORDER, world))
    assert surplus.total() == -len(ORDER) % world


def test_fewer_samples_than_ranks() -> None:
    assert [rank_shard([7], 3, rank) for rank in range(3)] == [[7], [7], [7]]
    assert padded_positions([7], 3) == [7, 7]


def test_remaining_keeps_the_order() -> None:
    assert remaining_positions(np.array([4, 1, 3, 0, 2]), np.array([3, 4])).tolist() == [1, 0, 2]


# samplers


def all_ranks(kind: str, world: int, padding: str = "pad") -> list[list[list[int]]]:
    if kind == "standard":
        return [fixed_batches(ORDER, 8, world, rank) for rank in range(world)]
    if kind == "length_grouped":
        return [length_grouped_batches(ORDER, LENGTHS, 8, world, rank, seed=5) for rank in range(world)]
    return [token_budget_batches(ORDER, LENGTHS, 600, world, rank, 5, padding) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["standard", "length_grouped", "token_budget"])
def test_every_sample_once_and_equal_steps(kind: str, world: int) -> None:
    ranks = all_ranks(kind, world)
    assert len({len(batches) for batches in ranks}) == 1
    emitted = Counter(position for batches in ranks for batch in batches for position in batch)
    surplus = emitted - Counter(ORDER.tolist())
    planned = planned_duplicates(LoaderSettings(kind), ORDER, world)
    assert set(emitted) == set(ORDER.tolist())
    assert sorted(surplus.elements()) == sorted(planned)
    assert all(batch for batches in ranks for batch in batches)


def padding_ratio(batches: list[list[int]]) -> float:
    real = sum(int(LENGTHS[batch].sum()) for batch in batches)
    return 1 - real / sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)


def test_grouping_by_length_saves_padding() -> None:
    standard, grouped = (padding_ratio(all_ranks(kind, 1)[0]) for kind in ("standard", "length_grouped"))
    assert standard > 0.35
    assert grouped < 0.1


@pytest.mark.parametrize("padding", ["pad", "pack"])
def test_token_budget_is_kept_and_used(padding: str) -> None:
    batches = all_ranks("token_budget", 1, padding)[0]
    costs = [
        int(LENGTHS[batch].sum()) if padding == "pack" else len(batch) * int(LENGTHS[batch].max())
        for batch in batches
    ]
    assert max(costs) <= 600
    assert np.mean(costs) > 480


def test_a_sample_beyond_the_budget_is_its_own_batch() -> None:
    lengths = np.array([10, 700, 10, 10])
    batches = token_budget_batches(np.arange(4), lengths, 100, 1, 0, seed=0)
    assert sorted(map(sorted, batches)) == [[0, 2, 3], [1]]


def test_steps_of_token_budget_have_like_cost_on_all_ranks() -> None:
    ranks = all_ranks("token_budget", 2)
    costs = [[len(batch) * int(LENGTHS[batch].max()) for batch in batches] for batches in ranks]
    assert np.mean(np.abs(np.subtract(*costs))) < 60


# transport


def test_a_parcel_arrives_as_a_plain_dictionary_with_equal_tensors() -> None:
    sent = Parcel(
        ids=torch.arange(5),
        half=torch.randn(3, 4).to(torch.bfloat16),
        empty=torch.zeros(0, 3),
        mask=torch.tensor([True, False]),
        scalar=torch.tensor(2.5),
        large=torch.zeros(1 << 19, dtype=torch.float32),
        count=7,
        lengths=(1, 2),
    ).share_large_tensors()
    assert sent["large"].is_shared()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    arrived = context.Event()
    child = context.Process(target=lambda: (sender.send(sent), arrived.wait(30)))
    child.start()
    received = receiver.recv()
    arrived.set()
    child.join()
    assert type(received) is dict
    assert (received["count"], received["lengths"]) == (7, (1, 2))
    for key in ("ids", "half", "empty", "mask", "scalar", "large"):
        assert received[key].dtype == sent[key].dtype
        assert torch.equal(received[key], sent[key])


def test_the_dataset_answers_the_worker_loops_of_old_and_new_torch() -> None:
    dataset = ParcelDataset(Dataset(LENGTHS))
    assert dataset.pop() is dataset
    assert not hasattr(dataset, "__getitems__")
    assert torch.equal(dataset[3]["input_ids"], torch.zeros(int(LENGTHS[3]), dtype=torch.int64))


# odb


@pytest.mark.parametrize("scaling", ["none", "exact"])
def test_odb_emits_every_sample_once_within_the_budget(scaling: str) -> None:
    settings = LoaderSettings(**{**ODB.__dict__, "odb_loss_scaling": scaling})
    epochs = []
    for epoch in range(2):
        order = epoch_positions(len(LENGTHS), 3, epoch)
        one = loader(settings, order, epoch=epoch)
        batches = list(one)
        one.close()
        epochs.append([row for batch in batches for row in batch["rows"].tolist()])
        for batch in batches:
            assert batch["odb_info"].all_samples_this_step == len(batch["rows"])
            assert batch["odb_info"].loss_scale == 1.0
            assert "total_batch_size" not in batch
            lengths = LENGTHS[batch["rows"].numpy()]
            # odb divides the budget by the length of the sample before, which is at least as long
            assert len(lengths) * lengths.min() <= 600 or len(lengths) == 1
        assert len(batches) < 60
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(len(LENGTHS)))
    assert epochs[0] != epochs[1]
    again = loader(settings)
    assert [row for batch in again for row in batch["rows"].tolist()] == epochs[0]
    again.close()
    assert multiprocessing.active_children() == []


def test_odb_can_be_stopped_in_the_middle() -> None:
    one = loader(ODB, dataset=Dataset(LENGTHS, delay=0.002))
    next(iter(one))
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 5
    assert multiprocessing.active_children() == []
    one.close()  # a second time does nothing


def test_lost_metadata_is_an_error() -> None:
    one = loader(ODB, collate=collate_without_metadata)
    with pytest.raises(UserError, match="did not reach the training loop: total_batch_size"):
        next(iter(one))
    one.close()


@pytest.mark.parametrize("kind", ["odb", "standard"])
@pytest.mark.parametrize("where", ["sample", "collate"])
def test_an_error_of_a_loader_process_reaches_the_training(kind: str, where: str) -> None:
    """One bad sample among many; left to odb alone, the training would wait for ever."""

    class Broken(Dataset):
        def __getitem__(self, position: int) -> dict:
            if where == "sample" and position == 17:
                raise UserError("record 17 is broken", fix="mend it")
            return super().__getitem__(position)

    def faulty(samples: list[dict]) -> dict:
        if where == "collate" and any(sample["row"] == 17 for sample in samples):
            raise ValueError("record 17 is broken")
        return collate(samples)

    settings = LoaderSettings(**{**ODB.__dict__, "kind": kind, "fixed_batch_size": 4, "prefetch_factor": 8})
    one = loader(settings, dataset=Broken(LENGTHS), collate=faulty)
    with pytest.raises(UserError if where == "sample" else ValueError, match="record 17 is broken"):
        list(one)
    one.close()
    assert multiprocessing.active_children() == []


def test_loader_processes_die_with_the_training(tmp_path: Path) -> None:
    """SIGKILL of the process that owns a loader leaves neither workers nor the collate process."""
    note = tmp_path / "pids"
    owner = os.fork()
    if owner == 0:
        one = loader(ODB, dataset=Dataset(LENGTHS, delay=0.01))
        iterator = iter(one)
        next(iterator)
        pids = [process.pid for process in [one._iterator._collate_process, *one._iterator._workers]]
        note.write_text(" ".join(map(str, pids)))
        time.sleep(60)
    while not note.exists() or not note.read_text():
        time.sleep(0.02)
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 3
    os.kill(owner, 9)
    os.waitpid(owner, 0)
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Whether a process runs (one that waits to be reaped does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_prepared_by_accelerate_odb_would_be_lost() -> None:
    """Why our loader is never handed to ``accelerator.prepare``."""
    from accelerate import Accelerator

    plain = torch.utils.data.DataLoader(ParcelDataset(Dataset(LENGTHS)), batch_size=1, num_workers=1)
    odb.apply(plain, token_budget=600)
    assert hasattr(plain, "_odb_handle")
    prepared = Accelerator(cpu=True).prepare(plain)
    assert not getattr(prepared, "_odb_enabled", False) or "_get_iterator" not in vars(
        prepared.base_dataloader
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 0}, "needs worker processes"),
        ({"buffer_size": 1}, "buffer size 1 is too small"),
        ({"token_budget": 0}, "token budget is 0"),
        ({"kind": "other"}, "unknown loader 'other'"),
        ({"kind": "standard", "fixed_batch_size": 0}, "batch size is 0"),
    ],
)
def test_settings_that_cannot_work(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_loader_settings(LoaderSettings(**{**ODB.__dict__, **changes}), shortest=5)
