"""Per-sample losses and last-token log-probabilities: equal however samples are batched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from odb_workflow.loaders.collate import Collator
from odb_workflow.model.forward import build_forward
from odb_workflow.runtime.errors import UserError
from tiny_qwen3_vl import PAD, SAMPLES, plain_logits, tiny_model

EVERY = [sample for samples in SAMPLES.values() for sample in samples]
LETTERS = torch.tensor([11, 290, 47, 5])


@pytest.fixture(scope="module")
def expected() -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [N] and log-probabilities [N, 4] of the transformers forward, one sample at a time."""
    model = tiny_model()
    losses, letters = [], []
    for sample in EVERY:
        logits = plain_logits(model, sample).float()
        losses.append(F.cross_entropy(logits[:-1], sample["labels"][1:], ignore_index=-100, reduction="sum"))
        letters.append(logits[-1].log_softmax(-1)[LETTERS])
    return torch.stack(losses), torch.stack(letters)


@pytest.mark.parametrize("performance", ["auto", "reference"])
@pytest.mark.parametrize("padding", ["pad", "pack"])
@pytest.mark.parametrize("batch_size", [1, 3, len(EVERY)])
def test_equal_at_any_batch_composition(
    expected: tuple[torch.Tensor, torch.Tensor], batch_size: int, padding: str, performance: str
) -> None:
    model = tiny_model()
    forward = build_forward(model, performance, "cpu", training=False)
    collator = Collator.from_config(model.config, PAD, padding)
    # longest first, so that neighbours differ from the order in which the expected values were made
    order = sorted(range(len(EVERY)), key=lambda n: -len(EVERY[n]["input_ids"]))
    losses, letters = torch.zeros(len(EVERY)), torch.zeros(len(EVERY), 4)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collator([EVERY[n] for n in chosen])
        losses[chosen] = forward(batch, mode="sample_losses")
        letters[chosen] = forward(batch, mode="last_logprobs", token_ids=LETTERS)
    assert not losses.requires_grad and not letters.requires_grad
    assert torch.allclose(losses, expected[0], rtol=1e-5, atol=1e-5)
    assert torch.allclose(letters, expected[1], rtol=1e-5, atol=1e-5)


def test_sum_of_sample_losses_is_the_loss() -> None:
    model = tiny_model()
    forward = build_forward(model, "auto", "cpu", training=True)
    batch = Collator.from_config(model.config, PAD, "pack")(SAMPLES["mixed"])
    assert forward(batch, "sample_losses").sum().item() == pytest.approx(forward(batch).item(), rel=1e-6)


def test_sample_without_labels_has_a_loss_of_zero() -> None:
    model = tiny_model()
    bare = {**SAMPLES["text"][0], "labels": torch.full_like(SAMPLES["text"][0]["labels"], -100)}
    for performance in ("auto", "reference"):
        forward = build_forward(model, performance, "cpu", training=False)
        batch = Collator.from_config(model.config, PAD)([bare, SAMPLES["text"][1]])
        losses = forward(batch, "sample_losses")
        assert losses[0] == 0 and losses[1] > 0


def test_mistaken_calls_are_refused() -> None:
    forward = build_forward(tiny_model(), "auto", "cpu", training=False)
    batch = Collator.from_config(forward.model.config, PAD)(SAMPLES["one"])
    with pytest.raises(ValueError, match="unknown mode 'losses'"):
        forward(batch, "losses")
    with pytest.raises(ValueError, match="token_ids"):
        forward(batch, "last_logprobs")


def test_other_models_use_the_plain_forward() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    forward = build_forward(Qwen2ForCausalLM(config), "auto", "cpu", training=True)
    assert forward.switches["mode"] == "reference"
    assert forward.switches["reason"] == "qwen2 is not qwen3_vl"
    collator = Collator(PAD, -1, 1, host_metadata=False)
    loss = forward(collator(SAMPLES["text"]))
    assert loss.item() == pytest.approx(27 * 5.8, rel=0.2)
    batch = Collator.from_config(tiny_model().config, PAD, host_metadata=False)(SAMPLES["one"])
    with pytest.raises(UserError, match="takes no pixel_values"):
        forward(batch)
