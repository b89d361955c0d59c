"""The search for the largest fixed batch size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from odb_workflow.runtime.errors import UserError
from odb_workflow.training import batch_size
from odb_workflow.training.agreement import Ranks
from odb_workflow.training.arguments import loader_settings, parse_arguments, training_identity
from odb_workflow.training.batch_size import StepRehearsal, choose_batch_size, largest_size
from odb_workflow.training.engines import OptimizerSettings, PlainEngine

CPU = torch.device("cpu")
MB = 1_000_000


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 21, 31, 32])
def test_small_limits_are_found_exactly(limit: int) -> None:
    asked: list[int] = []
    assert largest_size(lambda size: asked.append(size) or size <= limit, 1000) == limit
    assert all(size <= 2 * max(limit, 1) for size in asked), "far above the limit nothing may be tried"
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("limit", [100, 257, 5000])
def test_large_limits_are_found_within_the_resolution(limit: int) -> None:
    found = largest_size(lambda size: size <= limit, 100_000)
    assert limit * (1 - 1 / batch_size.RESOLUTION) <= found <= limit


@pytest.mark.parametrize("most", [1, 2, 3, 8, 100])
def test_never_more_than_there_are_samples(most: int) -> None:
    asked: list[int] = []
    assert largest_size(lambda size: asked.append(size) or True, most) == most
    assert max(asked) == most


def test_no_size_above_one_that_failed_is_tried() -> None:
    asked: list[int] = []
    largest_size(lambda size: asked.append(size) or size <= 40, 1000)
    failed = [size for size in asked if size > 40]
    assert failed == sorted(failed, reverse=True)
    assert asked == [1, 2, 4, 8, 16, 32, 64, 48, 40, 44, 42]


class Engine:
    """Pretends that a step of n samples takes ``fixed`` + n x ``each`` bytes more than the process had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fixed: int, each: int, pending: int = 0) -> None:
        self.sizes: list[int] = []
        self.pending = pending
        monkeypatch.setattr(batch_size, "resident_bytes", lambda: 500 * MB)
        peak = lambda: 500 * MB + fixed + each * self.sizes[-1]  # noqa: E731
        monkeypatch.setattr(batch_size, "process_peak_bytes", peak)
        monkeypatch.setattr(batch_size, "forget_peak", lambda: None)
        monkeypatch.setattr(batch_size.gc, "collect", lambda: 0)

    def rehearse(self, batch: dict) -> None:
        self.sizes.append(len(batch["positions"]))
        torch.rand(3)
        np.random.random()

    def pending_bytes(self) -> int:
        return self.pending


class Dataset:
    def __getitem__(self, position: int) -> dict:
        return {"position": position}


class Mover:
    device = CPU

    def __call__(self, batch: dict) -> dict:
        return batch


def collate(samples: list[dict]) -> dict:
    return {"positions": [sample["position"] for sample in samples]}


def rehearsal(engine: Engine, monkeypatch: pytest.MonkeyPatch, usable: int) -> StepRehearsal:
    monkeypatch.setattr(batch_size, "available_bytes", lambda: int(usable / batch_size.USABLE_SHARE["cpu"]))
    data = SimpleNamespace(dataset=Dataset(), lengths=np.arange(200))
    return StepRehearsal(data, collate, Mover(), engine)


def test_on_a_cpu_no_step_above_the_limit_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MB of gradients, 10 MB a sample, 200 MB of optimizer states: 80 samples fit 1,100 MB."""
    engine = Engine(monkeypatch, 100 * MB, 10 * MB, pending=200 * MB)
    tried = rehearsal(engine, monkeypatch, 1101 * MB)
    found = largest_size(tried.fits, 200)
    assert 75 <= found <= 80
    assert max(engine.sizes) <= 80
    assert tried.tried[found] == 300 * MB + 10 * MB * found
    assert max(tried.tried) > 80, "a size that was only predicted is noted too"


def test_on_a_gpu_running_out_and_the_margin_both_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 1,000 bytes, 300 of them the model: a sample takes 50, the optimizer 100; the limit is 900."""
    now, peak, freed = [300], [300], []

    def take(count: int) -> None:
        if now[0] + count > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        peak[0] = max(peak[0], now[0] + count)

    class Reserve:
        def __init__(self, count: int, **_: object) -> None:
            take(count)
            self.count = count
            now[0] += count

        def __del__(self) -> None:
            now[0] -= self.count

    cuda = SimpleNamespace(
        mem_get_info=lambda device: (690, 1000),
        memory_reserved=lambda device: 310,
        reset_peak_memory_stats=lambda *device: peak.__setitem__(0, now[0]),
        max_memory_allocated=lambda device: peak[0],
        synchronize=lambda device: None,
        empty_cache=lambda: freed.append(now[0]),
    )
    fake = SimpleNamespace(cuda=cuda, empty=Reserve, uint8=None, OutOfMemoryError=torch.OutOfMemoryError)
    monkeypatch.setattr(batch_size, "torch", fake)
    monkeypatch.setattr(batch_size.gc, "collect", lambda: 0)
    engine = SimpleNamespace(
        pending_bytes=lambda: 100, rehearse=lambda batch: take(50 * len(batch["positions"]))
    )
    mover = Mover()
    mover.device = SimpleNamespace(type="cuda")
    tried = StepRehearsal(SimpleNamespace(dataset=Dataset(), lengths=np.arange(200)), collate, mover, engine)
    assert largest_size(tried.fits, 200) == 10
    assert tried.tried == {1: 450, 2: 500, 4: 600, 8: 800, 16: None, 12: 1000, 10: 900, 11: 950}
    assert set(freed) == {300}, "nothing is held between attempts"

    def broken(batch: dict) -> None:
        raise RuntimeError("shapes do not match")

    engine.rehearse = broken
    with pytest.raises(RuntimeError, match="shapes"):
        tried.fits(1)


def test_the_longest_samples_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    engine = Engine(monkeypatch, 0, MB)
    tried = rehearsal(engine, monkeypatch, 100 * MB)
    tried._collate = lambda samples: seen.append([s["position"] for s in samples]) or {"positions": seen[-1]}
    assert tried.fits(1) and tried.fits(3)
    assert seen == [[199], [199, 198, 197]]


def test_the_choice_is_recorded_and_leaves_random_state_and_plan_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = SimpleNamespace(bytes_per_token=7, largest=0)
    engine = Engine(monkeypatch, 0, 10 * MB, pending=20 * MB)
    step = engine.rehearse
    engine.rehearse = lambda batch: (step(batch), setattr(plan, "bytes_per_token", 99))
    torch.manual_seed(3)
    np.random.seed(3)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    caplog.set_level("INFO")
    found = choose_batch_size(rehearsal(engine, monkeypatch, 101 * MB), plan, 200, Ranks(0, 1))
    assert (found["size"], found["per_rank"]) == (8, [8])
    assert found["tried"]["8"] == 100 * MB
    assert found["reserved_bytes"] == 20 * MB
    assert "fixed batch size 8 (of at most 200)" in caplog.text
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == before_numpy).all()
    assert plan.bytes_per_token == 7


def test_the_smallest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 0, 10 * MB)
    ranks = SimpleNamespace(gather_objects=lambda mine: [mine, 3, 12])
    found = choose_batch_size(rehearsal(engine, monkeypatch, 81 * MB), None, 200, ranks)
    assert (found["size"], found["per_rank"]) == (3, [8, 3, 12])


def test_one_sample_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 0, 10 * MB)
    with pytest.raises(UserError, match="not even a batch of one sample fits the memory of rank 0"):
        choose_batch_size(rehearsal(engine, monkeypatch, 5 * MB), None, 200, Ranks(0, 1))


def test_a_rehearsal_touches_neither_weights_nor_gradients() -> None:
    class Forward(torch.nn.Linear):
        def forward(self, batch: dict) -> torch.Tensor:
            return super().forward(batch["x"]).square().sum()

    forward = Forward(4, 2)
    engine = PlainEngine(forward, CPU, 1, OptimizerSettings(0.0, 1.0, "fp32", False))
    weights = {name: tensor.clone() for name, tensor in forward.state_dict().items()}
    assert engine.pending_bytes() == 2 * 10 * 4  # two moments of 10 float32 parameters
    engine.rehearse({"x": torch.ones(3, 4)})
    assert all(parameter.grad is None for parameter in forward.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in forward.state_dict().items())
    engine.accumulate({"x": torch.ones(3, 4)}, 1.0, True)
    engine.step(0.1)
    assert engine.pending_bytes() == 0


def test_memory_of_this_process_is_told() -> None:
    """Touching 64 MB more is seen in the resident size."""
    assert batch_size.available_bytes() > 0
    before = batch_size.resident_bytes()
    held = np.ones(8_000_000)
    assert batch_size.resident_bytes() - before > 0.9 * held.nbytes


def test_a_control_groups_limit_counts(tmp_path: Path) -> None:
    assert batch_size._control_group_bytes(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert batch_size._control_group_bytes(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert batch_size._control_group_bytes(tmp_path) == [450]


def test_the_flag() -> None:
    flags = ["--model", "m", "--loader", "standard", "--fixed-batch-size"]
    args = parse_arguments([*flags, "auto"])
    assert training_identity(args)["fixed_batch_size"] == "auto"
    assert loader_settings(args).fixed_batch_size == 1
    with pytest.raises(SystemExit):
        parse_arguments([*flags, "most"])
    with pytest.raises(UserError, match="--fixed-batch-size 0"):
        parse_arguments([*flags, "0"])
