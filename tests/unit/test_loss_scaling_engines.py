"""The optimizer step without DeepSpeed: float32 copies of 16-bit weights, clipping, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from odb_workflow.training.engines import OptimizerSettings, PlainEngine, parameter_groups

CPU = torch.device("cpu")


class Weighted(torch.nn.Module):
    """A summed loss whose gradient is the batch."""

    def __init__(self, dtype: torch.dtype, value: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 4), value, dtype=dtype))
        self.frozen = torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return (self.weight * batch["x"].to(self.weight.dtype)).float().sum()


def engine(module: torch.nn.Module, **changes: Any) -> PlainEngine:
    settings = {"weight_decay": 0.0, "max_grad_norm": 0.0, "precision": "bf16", "fused": True} | changes
    return PlainEngine(module, CPU, 1, OptimizerSettings(**settings))


def steps(one: PlainEngine, count: int, rate: float, factor: float = 1.0) -> list[float]:
    norms = []
    for _ in range(count):
        one.accumulate({"x": torch.ones(4, 4)}, factor, last=True)
        norms.append(float(one.step(rate)))
    return norms


def test_small_updates_of_bf16_weights_are_not_lost() -> None:
    """100 Adam steps of 1e-5 move a weight of 1 by 1e-3; bfloat16 rounds each of them away."""
    kept, lost = Weighted(torch.bfloat16), Weighted(torch.bfloat16)
    one = engine(kept)
    steps(one, 100, 1e-5)
    assert float(one._masters["weight"][0, 0]) == pytest.approx(1 - 1e-3, abs=5e-6)
    assert kept.weight.dtype == torch.bfloat16
    steps(one, 300, 1e-5)
    assert float(kept.weight.detach()[0, 0]) == pytest.approx(1 - 4e-3, abs=2e-3)
    assert float(kept.weight.detach()[0, 0]) < 1
    steps(engine(lost, sixteen_bit_states=True), 400, 1e-5)
    assert float(lost.weight.detach()[0, 0]) == 1


@pytest.mark.parametrize(("limit", "moved"), [(0.0, 2.0), (0.5, 2.0)])
def test_the_norm_is_that_before_clipping(limit: float, moved: float) -> None:
    module = Weighted(torch.float32)
    norms = steps(engine(module, max_grad_norm=limit, precision="fp32"), 1, 1e-3, factor=0.5)
    assert norms == pytest.approx([moved])  # sixteen gradients of 0.5
    assert module.weight.grad is None


def test_accumulated_gradients_add_up() -> None:
    module = Weighted(torch.float32)
    one = engine(module, precision="fp32")
    assert float(one.accumulate({"x": torch.ones(4, 4)}, 0.25, last=False)) == 16.0
    one.accumulate({"x": torch.full((4, 4), 2.0)}, 0.25, last=True)
    assert torch.allclose(module.weight.grad, torch.full((4, 4), 0.75))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_engine_goes_on_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = Weighted(dtype)
    steps(engine(whole), 7, 1e-3)
    first, second = Weighted(dtype), Weighted(dtype, value=5.0)
    one = engine(first)
    steps(one, 3, 1e-3)
    one.save(tmp_path, is_main=True)
    two = engine(second)
    two.load(tmp_path)
    steps(two, 4, 1e-3)
    assert torch.equal(second.weight, whole.weight)


def test_norms_and_biases_have_no_weight_decay() -> None:
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    groups = parameter_groups([matrix, bias], 0.1)
    assert [(group["params"], group["weight_decay"]) for group in groups] == [([matrix], 0.1), ([bias], 0.0)]
