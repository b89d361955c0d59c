"""Versions, switches, and the plan of what to recompute."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from odb_workflow.model import compat
from odb_workflow.model.attention import segment_attention
from odb_workflow.model.checkpointing import CheckpointPlan, layer_bytes_per_token, layers_to_recompute
from odb_workflow.model.head import (
    LossHead,
    chunk_tokens,
    fused_losses_and_gradient,
    token_losses_and_gradient,
)
from odb_workflow.model.performance import PerformanceSettings
from odb_workflow.runtime.errors import UserError
from tiny_qwen3_vl import tiny_config

CPU = torch.device("cpu")


def test_versions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert compat.release("2.14.1+cu130") == (2, 14)
    assert compat.release("2.11.0a0+git12") == (2, 11)
    compat.check_versions()
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(UserError, match=r"torch 2\.10\.1 is older than 2\.11"):
        compat.check_versions()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with caplog.at_level(logging.WARNING):
        compat.check_versions()
    assert "newer than 2.14" in caplog.text


def test_cudnn_can_be_forbidden_and_allowed_again() -> None:
    from torch.nn.attention import varlen

    original = varlen._should_use_cudnn
    compat.set_cudnn_attention(False)
    assert torch.backends.cuda.cudnn_sdp_enabled() is False
    assert varlen._should_use_cudnn(0) is False
    compat.set_cudnn_attention(True)
    assert varlen._should_use_cudnn is original
    assert torch.backends.cuda.cudnn_sdp_enabled() is True


def test_no_varlen_kernel_on_a_cpu() -> None:
    assert compat.has_varlen_attention(CPU, torch.bfloat16) is False


def test_settings_from_text() -> None:
    assert PerformanceSettings.parse(None) == PerformanceSettings.parse("auto") == PerformanceSettings()
    assert PerformanceSettings.parse("reference").mode == "reference"
    parsed = PerformanceSettings.parse('{"compile_layers": false, "checkpointing": 2}')
    assert (parsed.compile_layers, parsed.checkpointing) == (False, 2)
    assert parsed.with_checkpointing("on").checkpointing == "on"
    assert parsed.with_checkpointing(False).checkpointing == "off"
    assert PerformanceSettings().on("no_mask", True) is True


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fast", "neither auto, reference nor JSON"),
        ('{"speed": 9}', "unknown switch 'speed'"),
        ({"compile_layers": "yes"}, "compile_layers is 'yes'"),
        ({"checkpointing": 0}, "checkpointing is 0"),
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"loss_chunk_tokens": -1}, "loss_chunk_tokens is -1"),
        ("[1]", r"performance is \[1\]"),
    ],
)
def test_wrong_settings_are_named(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PerformanceSettings.parse(value)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_segments_do_not_see_each_other(causal: bool, key_heads: int) -> None:
    torch.manual_seed(0)
    lengths = (5, 5, 3, 1, 1, 7)
    query = torch.randn(1, 4, 22, 8)
    key, value = torch.randn(1, key_heads, 22, 8), torch.randn(1, key_heads, 22, 8)
    owner = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    allowed = owner[:, None] == owner[None]
    if causal:
        allowed &= torch.ones(22, 22).tril().bool()
    repeated = [tensor.repeat_interleave(4 // key_heads, 1) for tensor in (key, value)]
    expected = F.scaled_dot_product_attention(query, *repeated, attn_mask=allowed, scale=0.3)
    found = segment_attention(query, key, value, lengths, causal, 0.3)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)


def test_loss_head_in_chunks_equals_autograd() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (37,))
    F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum").mul(0.25).backward()
    expected = hidden.grad.clone(), weight.grad.clone()
    for chunk in (1, 8, 37, 100):
        hidden.grad = weight.grad = None
        head = LossHead(50, chunk)
        loss = head.summed(hidden, weight, targets)
        (loss * 0.25).backward()
        assert torch.allclose(hidden.grad, expected[0], atol=1e-6)
        assert torch.allclose(weight.grad, expected[1], atol=1e-6)
        assert torch.allclose(head.per_token(hidden, weight, targets).sum(), loss, rtol=1e-6)


def test_both_loss_kernels_agree() -> None:
    logits, targets = torch.randn(9, 20), torch.randint(0, 20, (9,))
    fused = fused_losses_and_gradient(logits, targets, 2.0)
    in_place = token_losses_and_gradient(logits.clone(), targets, 2.0)
    assert torch.allclose(fused[0], in_place[0], atol=1e-6)
    assert torch.allclose(fused[1], in_place[1], atol=1e-6)


def test_chunk_follows_the_vocabulary() -> None:
    assert chunk_tokens(151_936, 0, compiled=False) == 1766
    assert chunk_tokens(151_936, 0, compiled=True) == 8192
    assert chunk_tokens(151_936, 500, compiled=False) == 500


def test_layers_to_recompute() -> None:
    # 10 layers, 100 bytes a token each, 4 bytes for the input of a recomputed one
    assert layers_to_recompute(1000, 10, 100, 4, free_bytes=1_000_000) == 0
    assert layers_to_recompute(1000, 10, 100, 4, free_bytes=900_000) == 3
    assert layers_to_recompute(1000, 10, 100, 4, free_bytes=0) == 10


def test_checkpoint_plan_on_a_cpu() -> None:
    text = tiny_config().text_config
    assert CheckpointPlan("auto", text, 4, CPU)(10**9) == frozenset()
    assert CheckpointPlan("auto", text, 4, CPU).describe() == "off"
    assert CheckpointPlan("on", text, 4, CPU)(1) == {0, 1, 2, 3}
    assert CheckpointPlan(3, text, 4, CPU)(1) == {0, 3}
    assert CheckpointPlan(2, text, 4, CPU).describe() == "2 of 4 layers"


def test_checkpoint_plan_follows_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        total_memory = 1_000_000

    allocated = [0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    text = tiny_config().text_config
    plan = CheckpointPlan("auto", text, 2, torch.device("cuda", 0), pending_bytes=300_000)
    per_token = 4 * layer_bytes_per_token(tiny_config().text_config, 2)
    fitting = 600_000 // per_token
    assert plan(fitting) == frozenset()
    assert len(plan(fitting + 2)) in (1, 2)
    assert plan(100 * fitting) == {0, 1, 2, 3}
    # the optimizer's 300,000 bytes now show in what is allocated: nothing is counted twice
    allocated[0] = 300_000
    assert plan(fitting) == frozenset()
    # half the counted size was really kept: twice the tokens fit
    plan.measured(fitting, 0, fitting * per_token // 2)
    assert plan(2 * fitting - 2) == frozenset()
    assert plan.describe() == "auto (up to 4 of 4 layers)"


def test_compile_seconds_counts_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"entire_frame_compile": 2_000_000_000, "entire_backward_compile": 500_000_000, "code_gen": 9}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(cumulative_time_spent_ns=spent))
    assert compat.compile_seconds() == 2.5


def test_compile_seconds_is_zero_where_nothing_can_have_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert compat.compile_seconds() == 0.0
