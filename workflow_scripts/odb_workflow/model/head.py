"""Loss head: next-token cross-entropy in float32 on label tokens alone, never holding all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# float32 logits of one chunk; a chunk is worked on in place, so this is the head's peak beside the gradients.
CHUNK_BYTES = 1 << 30
FUSED_CHUNK_TOKENS = 8192
# float16 cannot hold the small gradients of a large vocabulary; they are scaled up here and down again later.
HALF_PRECISION_SCALE = 1024.0


def chunk_tokens(vocabulary: int, requested: int, compiled: bool) -> int:
    """Label tokens per chunk: what was requested, or what keeps one chunk's logits at :data:`CHUNK_BYTES`."""
    if requested:
        return requested
    if compiled:
        return FUSED_CHUNK_TOKENS
    return max(128, CHUNK_BYTES // (4 * vocabulary))


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each row of ``logits`` [K, V] in float32 -> [K]."""
    logits = logits.float()
    return torch.logsumexp(logits, -1) - logits.gather(1, targets[:, None]).squeeze(1)


def token_losses_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [K] and ``scale`` x the gradient of their sum in ``logits``' type; overwrites ``logits``."""
    dtype = logits.dtype
    logits = logits.float()
    normalizer = torch.logsumexp(logits, -1, keepdim=True)
    losses = (normalizer - logits.gather(1, targets[:, None])).squeeze(1)
    gradient = logits.sub_(normalizer).exp_()
    gradient.scatter_add_(1, targets[:, None], gradient.new_full((len(targets), 1), -1.0))
    if scale != 1.0:
        gradient.mul_(scale)
    return losses, gradient.to(dtype)


def fused_losses_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`token_losses_and_gradient` without in-place steps, in the form that the compiler fuses best."""
    values = logits.float()
    normalizer = torch.logsumexp(values, -1, keepdim=True)
    losses = (normalizer - values.gather(1, targets[:, None])).squeeze(1)
    probability = torch.exp(values - normalizer)
    hit = torch.arange(logits.shape[1], device=logits.device)[None] == targets[:, None]
    return losses, (torch.where(hit, probability - 1, probability) * scale).to(logits.dtype)


class LossHead:
    """The chunked head with its two kernels, compiled or not.

    Args:
        vocabulary: Columns of the logits.
        requested_chunk: Label tokens per chunk, 0 to choose.
        compiled: Fuse the element-wise part with ``torch.compile``.
    """

    def __init__(self, vocabulary: int, requested_chunk: int = 0, compiled: bool = False) -> None:
        self.chunk = chunk_tokens(vocabulary, requested_chunk, compiled)
        self.losses: Callable[..., Any] = token_losses
        self.losses_and_gradient: Callable[..., Any] = token_losses_and_gradient
        if compiled:
            self.losses = torch.compile(token_losses, dynamic=True)
            self.losses_and_gradient = torch.compile(fused_losses_and_gradient, dynamic=True)

    def summed(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the losses, float32 scalar with gradient.

        Args:
            hidden: [K, H] states that predict the labels; ``weight`` [V, H]; ``targets`` int64 [K].
        """
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _SummedLoss.apply(hidden, weight, targets, self)
        return self.per_token(hidden, weight, targets).sum()

    @torch.no_grad()
    def per_token(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Losses float32 [K] without gradient; arguments as in :meth:`summed`."""
        losses = [
            self.losses(F.linear(rows, weight), chunk)
            for rows, chunk in zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True)
        ]
        return torch.cat(losses) if losses else hidden.new_zeros(0, dtype=torch.float32)


class _SummedLoss(torch.autograd.Function):
    """Summed cross-entropy whose gradients are made in the forward pass, chunk by chunk.

    The backward pass then only multiplies them by the incoming scalar: one matrix product less than
    recomputing the logits, and nothing of size K x V is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: LossHead
    ) -> torch.Tensor:
        # Under autocast the states are 16-bit and the weights float32: compute as F.linear would, cast once.
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            states, matrix = hidden.to(dtype), weight.to(dtype)
            scale = HALF_PRECISION_SCALE if dtype == torch.float16 else 1.0
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            states_gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
            weight_gradient = torch.zeros_like(matrix) if ctx.needs_input_grad[1] else None
            for start in range(0, len(states), head.chunk):
                rows = states[start : start + head.chunk]
                losses, gradient = head.losses_and_gradient(
                    F.linear(rows, matrix), targets[start : start + head.chunk], scale
                )
                total += losses.sum()
                if states_gradient is not None:
                    torch.mm(gradient, matrix, out=states_gradient[start : start + head.chunk])
                if weight_gradient is not None:
                    weight_gradient.addmm_(gradient.t(), rows)
                del gradient
        ctx.scale, ctx.types = scale, (hidden.dtype, weight.dtype)
        ctx.save_for_backward(states_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = upstream / ctx.scale
        # Not in place: a second backward pass through the same graph must find the gradients unchanged.
        gradients = [
            None if gradient is None else (gradient * factor).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
        ]
        return gradients[0], gradients[1], None, None
