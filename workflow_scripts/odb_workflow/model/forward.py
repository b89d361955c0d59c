"""The forward pass of training and evaluation: one module for the plain and the fast form.

``build_forward`` resolves the switches; the module is what DDP or DeepSpeed wraps. Freeze parameters first.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any, Literal

import torch

from . import compat
from .attention import TEXT_ATTENTION, VISION_ATTENTION, register
from .checkpointing import CheckpointPlan
from .fast import FastQwen3VL, FastSwitches
from .head import LossHead
from .performance import PerformanceSettings
from .reference import ReferenceForward

logger = logging.getLogger(__name__)

Mode = Literal["loss", "sample_losses", "last_logprobs"]

# Compiling the layers of a 2B model took 21 s on an H200, plus 5-12 s per further mode, and made steps 5-20 %
# shorter at about 45,000 tokens/s: it repays from about 12 million tokens.
COMPILE_REPAYS_TOKENS = 12_000_000


class VLMForward(torch.nn.Module):
    """Losses of a vision-language model for collated batches.

    Args:
        model: The Hugging Face model, with its trainable parameters already chosen; see ``.model``.
        performance: The switches.
        device: Where it runs; by default where the parameters are.
        training: Whether gradients will be asked for.
        expected_tokens: Tokens that the whole run will process, if known; decides ``compile_layers: auto``.
        compute_dtype: Type of the activations where autocast changes it; by default that of the parameters.

    """

    def __init__(
        self,
        model: torch.nn.Module,
        performance: PerformanceSettings | None = None,
        device: torch.device | str | None = None,
        training: bool = True,
        expected_tokens: int | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.performance = performance or PerformanceSettings()
        parameter = next(model.parameters())
        self.device = torch.device(device) if device is not None else parameter.device
        self._switches: dict[str, Any] = {}
        self._reference: ReferenceForward | None = None
        self._fast: FastQwen3VL | None = None
        vision_trained = _vision_trained(model)
        reason = self._why_reference()
        if reason is not None:
            self._build_reference(reason, vision_trained, training)
        else:
            self._build_fast(vision_trained, compute_dtype or parameter.dtype, training, expected_tokens)

    @property
    def switches(self) -> dict[str, Any]:
        """What is really in use, for the record; ``checkpointing`` tells what ``auto`` came to so far."""
        if self._fast is not None:
            self._switches["checkpointing"] = self.plan.describe()
        return dict(self._switches)

    def forward(
        self, batch: dict[str, Any], mode: Mode = "loss", token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute one of three results for a batch of N samples (see ``Collator`` for its keys).

        Args:
            batch: Tensors on the model's device; tuples and numbers stay on the host.
            mode: ``loss``: float32 scalar, the SUM of the next-token losses over label tokens, with gradient.
                ``sample_losses``: float32 [N], the same per sample, without gradient.
                ``last_logprobs``: float32 [N, K], log-probabilities of ``token_ids`` int64 [K] after each
                sample's last real token.
        """
        if mode not in ("loss", "sample_losses", "last_logprobs"):
            raise ValueError(f"unknown mode {mode!r}")
        if mode == "last_logprobs" and token_ids is None:
            raise ValueError("last_logprobs needs token_ids")
        if self._reference is not None:
            if mode == "loss":
                return self._reference.summed_loss(batch)
            if mode == "sample_losses":
                return self._reference.sample_losses(batch)
            return self._reference.last_logprobs(batch, token_ids)
        if mode == "loss":
            return self._fast_loss(batch)
        if mode == "sample_losses":
            return self._fast_sample_losses(batch)
        return self._fast_last_logprobs(batch, token_ids)

    def _fast_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        watched = self.plan.automatic and torch.is_grad_enabled()
        before = torch.cuda.memory_allocated(self.device) if watched else 0
        hidden, targets = self._label_states(batch)
        if watched:
            tokens = batch["input_ids"].numel()
            grown = torch.cuda.memory_allocated(self.device) - before
            self.plan.measured(tokens, len(self.plan.last), grown)
        return self.head.summed(hidden, self.model.lm_head.weight, targets)

    @torch.no_grad()
    def _fast_sample_losses(self, batch: dict[str, Any]) -> torch.Tensor:
        hidden, targets = self._label_states(batch)
        losses = self.head.per_token(hidden, self.model.lm_head.weight, targets)
        sums = torch.zeros(len(batch["lengths"]), dtype=torch.float64, device=losses.device)
        return sums.index_add_(0, batch["label_samples"], losses.double()).float()

    @torch.no_grad()
    def _fast_last_logprobs(self, batch: dict[str, Any], token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self._fast.hidden(batch, batch["last_positions"])
        token_ids = token_ids.to(hidden.device)
        # Only the wanted logits and the normalizer leave a chunk.
        return torch.cat(
            [
                self.model.lm_head(rows).float().log_softmax(-1).index_select(1, token_ids)
                for rows in hidden.split(self.head.chunk)
            ]
        )

    def _label_states(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if self._switches["loss_head"] == "chunked":
            return self._fast.hidden(batch, batch["label_positions"]), batch["label_targets"]
        # `full`: the states of every token, as the plain forward has them, then the same labels.
        every = torch.arange(batch["input_ids"].numel(), device=batch["input_ids"].device)
        states = self._fast.hidden(batch, every).index_select(0, batch["label_positions"])
        return states, batch["label_targets"]

    def _why_reference(self) -> str | None:
        if self.performance.mode == "reference":
            return "asked for"
        if not compat.is_qwen3_vl(self.model):
            return f"{getattr(self.model.config, 'model_type', type(self.model).__name__)} is not qwen3_vl"
        text = self.model.config.text_config
        if getattr(text, "attention_dropout", 0.0):
            return "attention dropout is not 0"
        if self.model.lm_head.bias is not None:
            return "the language model's head has a bias"
        return None

    def _build_reference(self, reason: str, vision_trained: bool, training: bool) -> None:
        if compat.is_qwen3_vl(self.model):
            _set_attention(self.model, None)
            _compile_layers(self.model, False)
        if self.performance.on("cudnn_attention", True) and self.device.type == "cuda":
            compat.set_cudnn_attention(True)
        choice = self.performance.checkpointing
        recompute = training and (
            choice not in ("auto", "off") or (choice == "auto" and self.device.type == "cuda")
        )
        compat.set_checkpointing(self.model, recompute)
        self._reference = ReferenceForward(self.model, vision_trained and training)
        self._switches = {
            "mode": "reference",
            "reason": reason,
            "checkpointing": "on" if recompute else "off",
        }
        if reason != "asked for":
            logger.warning("performance: plain transformers forward, because %s", reason)

    def _build_fast(
        self, vision_trained: bool, compute: torch.dtype, training: bool, expected_tokens: int | None
    ) -> None:
        settings = self.performance
        parameter = next(self.model.parameters())
        kernel = compat.has_varlen_attention(self.device, compute)
        on_cuda = self.device.type == "cuda"
        choice = FastSwitches(
            varlen_text=kernel and settings.attention != "sdpa",
            varlen_vision=kernel and settings.vision != "sdpa",
            host_positions=settings.on("host_positions", True),
            no_mask=settings.on("no_mask", True),
            linear_patch_embedding=settings.on("linear_patch_embedding", True),
            frozen_vision_without_graph=settings.on("frozen_vision_without_graph", True),
            vision_trained=vision_trained and training,
        )
        register()
        _set_attention(self.model, (TEXT_ATTENTION, VISION_ATTENTION))
        compat.set_checkpointing(self.model, False)
        if on_cuda:
            compat.set_cudnn_attention(settings.on("cudnn_attention", False))
        repays = on_cuda and expected_tokens is not None and expected_tokens >= COMPILE_REPAYS_TOKENS
        compiled = settings.on("compile_layers", repays)
        eager_rounding = compiled and settings.on("eager_rounding", False)
        _compile_layers(self.model, compiled, eager_rounding)
        text = self.model.config.text_config
        self.head = LossHead(text.vocab_size, settings.loss_chunk_tokens, compiled and on_cuda)
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        # Gradients, a float32 copy of 16-bit weights, and Adam's two float32 moments.
        pending = trained * (3 * 4 + (2 if parameter.element_size() == 2 else 0))
        self.plan = CheckpointPlan(
            settings.checkpointing if training else "off",
            text,
            torch.finfo(compute).bits // 8,
            self.device,
            pending_bytes=pending if training else 0,
            compiled=compiled,
        )
        self._fast = FastQwen3VL(self.model, choice, self.plan)
        self._switches = {
            "mode": "fast",
            "attention": "varlen" if choice.varlen_text else "sdpa",
            "vision": "varlen" if choice.varlen_vision else "sdpa",
            **{
                name: value
                for name, value in dataclasses.asdict(choice).items()
                if name not in ("varlen_text", "varlen_vision", "vision_trained")
            },
            "loss_head": "full" if settings.loss_head == "full" else "chunked",
            "loss_chunk_tokens": self.head.chunk,
            "compile_layers": compiled,
            "eager_rounding": eager_rounding,
            "checkpointing": self.plan.describe(),
            "cudnn_attention": on_cuda and settings.on("cudnn_attention", False),
            "fused_optimizer": settings.on("fused_optimizer", on_cuda),
            "pinned_batches": settings.on("pinned_batches", on_cuda),
            "bf16_pixels": compute == torch.bfloat16 and settings.on("bf16_pixels", True),
        }


def build_forward(
    model: torch.nn.Module,
    performance: PerformanceSettings | dict[str, Any] | str | None,
    device: torch.device | str,
    training: bool,
    expected_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> VLMForward:
    """Move ``model`` to ``device`` and wrap it; see :class:`VLMForward`.

    Raises:
        UserError: an unknown switch, or torch or transformers older than supported.
    """
    compat.check_versions()
    model.to(device)
    model.train(training)
    return VLMForward(
        model,
        PerformanceSettings.parse(performance),
        device,
        training=training,
        expected_tokens=expected_tokens,
        compute_dtype=compute_dtype,
    )


def _vision_trained(model: torch.nn.Module) -> bool:
    inner = getattr(model, "model", model)
    visual = getattr(inner, "visual", None) or getattr(inner, "vision_tower", None)
    return visual is not None and any(parameter.requires_grad for parameter in visual.parameters())


def _set_attention(model: torch.nn.Module, names: tuple[str, str] | None) -> None:
    """Give Qwen3-VL's two parts our attention functions, or (None) the ones they were loaded with.

    The attention modules get configurations of their own, so that the model's configuration, which is saved
    and copied, never names a function of ours.
    """
    language, visual = model.model.language_model, model.model.visual
    text_modules = [layer.self_attn for layer in language.layers]
    vision_modules = [block.attn for block in visual.blocks]
    for part, modules, position in ((language, text_modules, 0), (visual, vision_modules, 1)):
        config = part.config
        if names is not None:
            config = copy.copy(part.config)
            config._attn_implementation = names[position]
        for module in modules:
            module.config = config


def _compile_layers(model: torch.nn.Module, enabled: bool, eager_rounding: bool = False) -> None:
    """Compile each layer, or undo it."""
    for layer in [*model.model.language_model.layers, *model.model.visual.blocks]:
        if enabled:
            compat.compile_layer(layer, eager_rounding)
        else:
            layer._compiled_call_impl = None
