"""The fast forward against the transformers forward itself, in float32 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from odb_workflow.loaders.collate import Collator
from odb_workflow.model.forward import VLMForward, build_forward
from odb_workflow.model.freeze import apply_freezing
from tiny_qwen3_vl import PAD, SAMPLES, gradient_norm, plain, tiny_model

RELATIVE = 1e-5


def gradients_of(forward: VLMForward, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    forward.model.zero_grad()
    loss = forward(batch)
    assert loss.dtype == torch.float32 and loss.shape == ()
    loss.backward()
    parameters = forward.model.named_parameters()
    return loss.item(), {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def assert_equal_training(
    found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=RELATIVE)
    assert gradient_norm(found[1]) == pytest.approx(gradient_norm(expected[1]), rel=RELATIVE)
    for name, gradient in expected[1].items():
        difference = (found[1][name] - gradient).norm()
        assert difference <= 1e-4 * gradient.norm() + 1e-6 * gradient_norm(expected[1]), name
    # what the plain forward never touches may only have a gradient of zero
    for name in set(found[1]) - set(expected[1]):
        assert not found[1][name].any(), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("kind", list(SAMPLES))
def test_loss_and_gradients_equal_the_plain_forward(kind: str, vision: str, tied: bool) -> None:
    model = tiny_model(tied)
    apply_freezing(model, vision_tower=vision == "frozen", projector=vision == "frozen")
    expected = plain(model, SAMPLES[kind])
    for padding in ("pad", "pack"):
        batch = Collator.from_config(model.config, PAD, padding)(SAMPLES[kind])
        for performance in ("auto", "reference"):
            forward = build_forward(model, performance, "cpu", training=True)
            assert forward.switches["mode"] == ("fast" if performance == "auto" else "reference")
            assert_equal_training(gradients_of(forward, batch), expected)


@pytest.mark.parametrize(
    "parts",
    [
        {"vision_tower": True, "projector": False, "language_model": True},
        {"vision_tower": False, "projector": True, "language_model": True},
        {"vision_tower": True, "projector": False, "language_model": False},
    ],
    ids=["projector", "tower", "projector+language"],
)
def test_parts_trained_by_themselves(parts: dict[str, bool]) -> None:
    model = tiny_model()
    apply_freezing(model, **parts)
    expected = plain(model, SAMPLES["several"])
    batch = Collator.from_config(model.config, PAD, "pack")(SAMPLES["several"])
    assert_equal_training(gradients_of(build_forward(model, "auto", "cpu", True), batch), expected)


@pytest.mark.parametrize(
    "switches",
    [
        {"host_positions": False},
        {"no_mask": False},
        {"loss_head": "full"},
        {"loss_chunk_tokens": 5},
        {"linear_patch_embedding": False},
        {"frozen_vision_without_graph": False},
        {"checkpointing": "on"},
        {"checkpointing": 2},
        {"attention": "sdpa", "vision": "sdpa"},
        {"mode": "reference", "checkpointing": "on"},
    ],
    ids=str,
)
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_no_switch_changes_the_result(switches: dict[str, Any], vision: str) -> None:
    model = tiny_model()
    apply_freezing(model, vision_tower=vision == "frozen", projector=vision == "frozen")
    expected = plain(model, SAMPLES["several"])
    for padding in ("pad", "pack"):
        batch = Collator.from_config(model.config, PAD, padding)(SAMPLES["several"])
        forward = build_forward(model, switches, "cpu", training=True)
        assert_equal_training(gradients_of(forward, batch), expected)


@pytest.mark.parametrize("performance", ["auto", "reference"])
@pytest.mark.parametrize("padding", ["pad", "pack"])
def test_text_batch_gives_a_trained_vision_tower_zero_gradients(padding: str, performance: str) -> None:
    model = tiny_model()
    apply_freezing(model, vision_tower=False, projector=False)
    batch = Collator.from_config(model.config, PAD, padding)(SAMPLES["text"])
    _, gradients = gradients_of(build_forward(model, performance, "cpu", True), batch)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert not any(gradient.any() for name, gradient in gradients.items() if "visual" in name)


def test_batch_without_labels_has_a_loss_of_zero_and_zero_gradients() -> None:
    model = tiny_model()
    apply_freezing(model)
    sample = {**SAMPLES["one"][0], "labels": torch.full_like(SAMPLES["one"][0]["labels"], -100)}
    batch = Collator.from_config(model.config, PAD)([sample])
    for performance in ("auto", "reference"):
        loss, gradients = gradients_of(build_forward(model, performance, "cpu", True), batch)
        assert loss == 0.0
        assert set(gradients) == {n for n, p in model.named_parameters() if p.requires_grad}
        assert gradient_norm(gradients) == 0.0


def test_backward_twice_through_one_graph_adds_up() -> None:
    model = tiny_model()
    apply_freezing(model)
    batch = Collator.from_config(model.config, PAD)(SAMPLES["mixed"])
    forward = build_forward(model, "auto", "cpu", True)
    _, once = gradients_of(forward, batch)
    model.zero_grad()
    loss = forward(batch)
    (loss * 0.5).backward(retain_graph=True)
    (loss * 1.5).backward()
    for name, gradient in once.items():
        assert torch.allclose(model.get_parameter(name).grad, 2 * gradient, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_agree_with_float32(dtype: torch.dtype) -> None:
    model = tiny_model()
    apply_freezing(model)
    expected = plain(model, SAMPLES["several"])
    model.to(dtype)
    batch = Collator.from_config(model.config, PAD, "pack", pixel_dtype=dtype)(SAMPLES["several"])
    loss, gradients = gradients_of(build_forward(model, "auto", "cpu", True), batch)
    assert loss == pytest.approx(expected[0], rel=5e-3)
    assert gradient_norm(gradients) == pytest.approx(gradient_norm(expected[1]), rel=3e-2)


@pytest.mark.parametrize("padding", ["pad", "pack"])
def test_autocast_agrees_with_plain_autocast(padding: str) -> None:
    model = tiny_model()
    apply_freezing(model)
    batch = Collator.from_config(model.config, PAD, padding)(SAMPLES["several"])
    results = []
    for performance in ("reference", "auto"):
        forward = build_forward(model, performance, "cpu", True, compute_dtype=torch.bfloat16)
        forward.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(batch)
        loss.backward()
        parameters = [p for p in model.parameters() if p.grad is not None]
        assert all(p.grad.dtype == torch.float32 for p in parameters)
        results.append((loss.item(), gradient_norm({str(n): p.grad for n, p in enumerate(parameters)})))
    assert results[1][0] == pytest.approx(results[0][0], rel=2e-3)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-2)


def test_model_prepared_for_the_fast_forward_still_answers_a_plain_call() -> None:
    model = tiny_model().eval()
    untouched = copy.deepcopy(model)
    build_forward(model, "auto", "cpu", training=False)
    batch = Collator.from_config(model.config, PAD)(SAMPLES["several"])
    names = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
    inputs = {name: batch[name] for name in names}
    with torch.no_grad():
        found, expected = model(**inputs).logits, untouched(**inputs).logits
    real = batch["attention_mask"].bool()
    assert torch.allclose(found[real], expected[real], atol=2e-5)
    # and its configuration can be used for another model
    assert type(model)(model.config).config.vision_config._attn_implementation == "sdpa"


def test_layers_compile_for_all_shapes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    counters = {"Qwen3VLTextDecoderLayer": CompileCounter(), "Qwen3VLVisionBlock": CompileCounter()}
    original = torch.nn.Module.compile

    def counted(module: torch.nn.Module, **options: Any) -> None:
        original(module, dynamic=options["dynamic"], **{"backend": counters[type(module).__name__]})

    monkeypatch.setattr(torch.nn.Module, "compile", counted)
    torch._dynamo.reset()
    model = tiny_model()
    apply_freezing(model)
    collator = Collator.from_config(model.config, PAD)
    forward = build_forward(model, {"compile_layers": True}, "cpu", True)
    assert forward.switches["compile_layers"] is True
    compiled = []
    for kind in ("image", "several", "mixed", "text"):
        expected = plain_after(model, kind)
        assert_equal_training(gradients_of(forward, collator(SAMPLES[kind])), expected)
        compiled.append(counters["Qwen3VLTextDecoderLayer"].frame_count)
    # The vision blocks are left out: on a CPU their attention is called once per run of equal images.
    assert compiled[1:] == compiled[:1] * 3, f"shapes not seen before compiled again: {compiled}"
    build_forward(model, "auto", "cpu", True)
    assert model.model.language_model.layers[0]._compiled_call_impl is None


def plain_after(model: torch.nn.Module, kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The plain figures of a model with the same weights that was never compiled."""
    fresh = tiny_model()
    fresh.load_state_dict(model.state_dict())
    apply_freezing(fresh)
    return plain(fresh, SAMPLES[kind])
