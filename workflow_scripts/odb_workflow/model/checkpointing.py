"""Which layers to recompute in the backward pass, from the tokens of a batch and the free GPU memory."""

from __future__ import annotations

from typing import Any

import torch

# What compiled layers keep of the counted bytes (measured on an H200: 64 KB a token and layer of a 2B model).
COMPILED_SHARE = 0.6
# Share of the device's memory that a training step may plan to fill; the rest is fragmentation and kernels.
USABLE_SHARE = 0.90


def layer_bytes_per_token(text_config: Any, element_bytes: int) -> int:
    """Bytes that one decoder layer keeps for its backward pass, per token (not recomputed, not compiled).

    Counted from the layer's saved tensors: two norms with their float32 copies, query, key and value
    before and after norm and rotation, attention output, and four tensors of the MLP.
    """
    hidden = text_config.hidden_size
    head = getattr(text_config, "head_dim", None) or hidden // text_config.num_attention_heads
    query = head * text_config.num_attention_heads
    key_value = 2 * head * text_config.num_key_value_heads
    elements = 4 * hidden + 4 * (query + key_value) + query + 4 * text_config.intermediate_size
    return elements * element_bytes + 4 * (2 * hidden + query + key_value // 2)


class CheckpointPlan:
    """Chooses the layers to recompute for each batch.

    Under ``auto`` it plans with a counted figure until a first step was measured, then with the largest
    measured one. Only numbers that the host already has are read: no wait for the device.

    Args:
        choice: ``off``, ``on``, an interval k (every k-th layer), or ``auto``.
        text_config: The language model's configuration.
        element_bytes: Bytes per activation.
        device: Where the model trains. ``auto`` on a CPU is ``off``.
        pending_bytes: Gradients and optimizer states that are not allocated yet when the plan is made.
        compiled: Whether the layers are compiled.
    """

    def __init__(
        self,
        choice: str | int,
        text_config: Any,
        element_bytes: int,
        device: torch.device,
        pending_bytes: int = 0,
        compiled: bool = False,
    ) -> None:
        self.layers = text_config.num_hidden_layers
        self.hidden_bytes = text_config.hidden_size * element_bytes
        self.device = device
        self.automatic = choice == "auto" and device.type == "cuda"
        self.fixed = _interval(choice, self.layers) if not self.automatic else frozenset()
        counted = layer_bytes_per_token(text_config, element_bytes)
        self.bytes_per_token = int(counted * (COMPILED_SHARE if compiled else 1.0))
        self.pending_bytes = pending_bytes
        self.baseline = torch.cuda.memory_allocated(device) if self.automatic else 0
        self.last: frozenset[int] = self.fixed
        self.largest = 0

    def __call__(self, tokens: int) -> frozenset[int]:
        """Numbers of the layers to recompute for a batch of ``tokens`` (padding included)."""
        if not self.automatic:
            return self.fixed
        total = torch.cuda.get_device_properties(self.device).total_memory
        allocated = torch.cuda.memory_allocated(self.device)
        pending = max(0, self.pending_bytes - max(0, allocated - self.baseline))
        free = total * USABLE_SHARE - allocated - pending
        count = layers_to_recompute(tokens, self.layers, self.bytes_per_token, self.hidden_bytes, free)
        self.largest = max(self.largest, count)
        self.last = _spread(count, self.layers)
        return self.last

    def measured(self, tokens: int, recomputed: int, grown_bytes: int) -> None:
        """Take in what a forward pass really kept: ``grown_bytes`` with ``recomputed`` layers left out."""
        kept = self.layers - recomputed
        if not self.automatic or tokens == 0 or kept == 0:
            return
        per_token = (grown_bytes - tokens * recomputed * self.hidden_bytes) / (tokens * kept)
        self.bytes_per_token = int(max(per_token, self.bytes_per_token * 0.5))

    def describe(self) -> str:
        """For the record: what is in use."""
        if self.automatic:
            return f"auto (up to {self.largest} of {self.layers} layers)"
        return f"{len(self.fixed)} of {self.layers} layers" if self.fixed else "off"


def layers_to_recompute(
    tokens: int, layers: int, layer_bytes: int, hidden_bytes: int, free_bytes: float
) -> int:
    """Fewest layers (0 to all) to recompute so that the activations of ``tokens`` fit ``free_bytes``."""
    if tokens * layers * layer_bytes <= free_bytes:
        return 0
    # A recomputed layer keeps its input, and one layer at a time is rebuilt in full.
    for count in range(1, layers):
        kept = (layers - count + 1) * layer_bytes + count * hidden_bytes
        if tokens * kept <= free_bytes:
            return count
    return layers


def _interval(choice: str | int, layers: int) -> frozenset[int]:
    if choice in ("off", "auto"):
        return frozenset()
    return frozenset(range(0, layers, 1 if choice == "on" else int(choice)))


def _spread(count: int, layers: int) -> frozenset[int]:
    return frozenset(number * layers // count for number in range(count)) if count else frozenset()
