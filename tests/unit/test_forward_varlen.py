"""The one-kernel path of a GPU, with a stand-in for the kernel that a CPU can run.

The stand-in is a custom operator like torch's own, so that everything around the kernel is exercised: what is
passed to it, gradients through it, and that compiled layers trace it whole and for all shapes at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from odb_workflow.loaders.collate import Collator
from odb_workflow.model import compat
from odb_workflow.model.forward import build_forward
from odb_workflow.model.freeze import apply_freezing
from tiny_qwen3_vl import PAD, SAMPLES, gradient_norm, plain, plain_logits, tiny_model


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    outputs = []
    for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        parts = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        grouped = query.shape[1] != key.shape[1]
        output = F.scaled_dot_product_attention(*parts, is_causal=causal, scale=scale, enable_gqa=grouped)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@torch.library.custom_op("odb_test::varlen", mutates_args={})
def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    assert longest == int((boundaries[1:] - boundaries[:-1]).max())
    assert boundaries.dtype == torch.int32 and int(boundaries[-1]) == len(query)
    return _attend(query, key, value, boundaries, causal, scale)


@_kernel.register_fake
def _(query: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("odb_test::varlen_backward", mutates_args={})
def _kernel_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Written out, because an operator's own body has no autograd.
    groups = query.shape[1] // key.shape[1]
    gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        q, do = (tensor[start:end].transpose(0, 1) for tensor in (query, upstream))
        k, v = (tensor[start:end].transpose(0, 1).repeat_interleave(groups, 0) for tensor in (key, value))
        scores = q @ k.mT * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        weights = scores.softmax(-1)
        change = do @ v.mT
        change = weights * (change - (change * weights).sum(-1, keepdim=True)) * scale
        parts = (change @ k, change.mT @ q, weights.mT @ do)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[start:end] = part.unflatten(0, (gradient.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(gradients)


@_kernel_backward.register_fake
def _(upstream: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    query, key, value, boundaries, _, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, boundaries)


_kernel.register_autograd(
    lambda ctx, upstream: (
        *_kernel_backward(upstream, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None, None
    ),
    setup_context=_keep,
)  # fmt: skip


def stand_in(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Torch's ``varlen_attn`` as this project calls it."""
    assert window_size in ((-1, 0), (-1, -1))
    return _kernel(query, key, value, cu_q, max_q, window_size == (-1, 0), scale)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that seems to have the kernel."""
    monkeypatch.setattr(compat, "varlen_attn", stand_in)
    monkeypatch.setattr(compat, "has_varlen_attention", lambda device, dtype: True)
    monkeypatch.setattr(compat, "is_varlen_type", lambda tensor: True)


def train_once(forward: Any, batch: dict[str, Any]) -> tuple[float, float]:
    forward.model.zero_grad()
    loss = forward(batch)
    loss.backward()
    gradients = {n: p.grad for n, p in forward.model.named_parameters() if p.grad is not None}
    return loss.item(), gradient_norm(gradients)


@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("padding", ["pad", "pack"])
def test_one_kernel_equals_the_plain_forward(kernel: None, padding: str, vision: str) -> None:
    model = tiny_model()
    apply_freezing(model, vision_tower=vision == "frozen", projector=vision == "frozen")
    forward = build_forward(model, "auto", "cpu", training=True)
    assert forward.switches["attention"] == forward.switches["vision"] == "varlen"
    for kind, samples in SAMPLES.items():
        loss, gradients = plain(tiny_model() if vision == "trained" else model, samples)
        found = train_once(forward, Collator.from_config(model.config, PAD, padding)(samples))
        assert found[0] == pytest.approx(loss, rel=1e-5), kind
        assert found[1] == pytest.approx(gradient_norm(gradients), rel=1e-5), kind


def test_last_logprobs_by_one_kernel(kernel: None) -> None:
    model = tiny_model()
    forward = build_forward(model, "auto", "cpu", training=False)
    batch = Collator.from_config(model.config, PAD, "pack")(SAMPLES["several"])
    found = forward(batch, "last_logprobs", torch.tensor([7, 8]))
    for values, sample in zip(found, SAMPLES["several"], strict=True):
        assert torch.allclose(values, plain_logits(model, sample)[-1].log_softmax(-1)[7:9], atol=1e-5)


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_compiled_layers_are_traced_whole_and_once(
    kernel: None, monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    counters: dict[str, CompileCounterWithBackend] = {}
    original = torch.nn.Module.compile

    def counted(module: torch.nn.Module, **options: Any) -> None:
        counter = counters.setdefault(type(module).__name__, CompileCounterWithBackend("aot_eager"))
        original(module, dynamic=options["dynamic"], **{"backend": counter, "fullgraph": True})

    monkeypatch.setattr(torch.nn.Module, "compile", counted)
    torch._dynamo.reset()
    model = tiny_model()
    apply_freezing(model)
    expected = {kind: plain(model, samples) for kind, samples in SAMPLES.items()}
    switches = {"compile_layers": True, "checkpointing": checkpointing}
    forward = build_forward(model, switches, "cpu", training=True)
    collator = Collator.from_config(model.config, PAD, "pack")
    seen = []
    for kind in ("several", "image", "mixed", "text", "one"):
        loss, norm = train_once(forward, collator(SAMPLES[kind]))
        assert loss == pytest.approx(expected[kind][0], rel=1e-5), kind
        assert norm == pytest.approx(gradient_norm(expected[kind][1]), rel=1e-5), kind
        seen.append({name: counter.frame_count for name, counter in counters.items()})
    assert set(seen[0]) == {"Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"}
    # the later batches differ in samples, lengths, images and patches, and compile nothing anew
    assert seen[-1] == seen[0], seen
