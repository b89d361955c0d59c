"""The plain transformers forward: what every fast path is compared with, and what other models use."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from ..loaders.collate import unpack_batch
from ..processing.sample import IGNORE_INDEX
from ..runtime.errors import UserError
from . import compat

MODEL_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")


class ReferenceForward:
    """Losses and last-token log-probabilities from ``model(**inputs).logits``.

    Packed batches are laid out as padded rows first, because a plain forward knows no packing.
    """

    def __init__(self, model: torch.nn.Module, vision_trainable: bool) -> None:
        self.model = model
        self.vision_trainable = vision_trainable
        config = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        pad = getattr(text, "pad_token_id", None)
        self.pad_token_id = 0 if pad is None else int(pad)
        parameters = inspect.signature(model.forward).parameters
        self.accepted = {name for name in MODEL_INPUTS if name in parameters}
        self.keeps_logits = "logits_to_keep" in parameters

    def summed_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Sum of the next-token losses over label tokens, float32 scalar with gradient."""
        return self._row_losses(self._rows(batch)).sum()

    @torch.no_grad()
    def sample_losses(self, batch: dict[str, Any]) -> torch.Tensor:
        """Summed loss of each sample, float32 [N]."""
        return self._row_losses(self._rows(batch))

    @torch.no_grad()
    def last_logprobs(self, batch: dict[str, Any], token_ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of ``token_ids`` [K] after each sample's last real token, float32 [N, K]."""
        batch = self._rows(batch)
        logits = self._logits(batch)
        last = batch["lengths"].to(logits.device) - 1
        final = logits[torch.arange(len(logits), device=logits.device), last]
        return final.float().log_softmax(-1)[:, token_ids.to(logits.device)]

    def _rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        return unpack_batch(batch, self.pad_token_id) if "cu_seqlens" in batch else batch

    def _logits(self, batch: dict[str, Any]) -> torch.Tensor:
        inputs = {name: batch[name] for name in MODEL_INPUTS if name in self.accepted and name in batch}
        if "pixel_values" in batch and "pixel_values" not in self.accepted:
            raise UserError(
                f"{type(self.model).__name__} takes no pixel_values: it is no vision-language model",
                where="model.path",
                fix="choose a vision-language model, for example Qwen/Qwen3-VL-2B-Instruct",
            )
        if self.vision_trainable and "pixel_values" not in batch:
            inputs = self._text_only(batch)
        return self.model(**inputs, use_cache=False).logits

    def _text_only(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs of a batch without images whose trained vision tower must still take part in the graph."""
        if not compat.is_qwen3_vl(self.model):
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                raise UserError(
                    "a batch without images met a trained vision tower that this project does not know",
                    where="training.freeze_vision_tower",
                    fix="freeze the vision tower and the projector, or train on one process",
                )
            return {name: batch[name] for name in ("input_ids", "attention_mask")}
        embeddings = self.model.get_input_embeddings()(batch["input_ids"])
        return {
            "inputs_embeds": embeddings + dummy_vision(self.model, embeddings),
            "attention_mask": batch["attention_mask"],
            "position_ids": batch["position_ids"],
        }

    def _row_losses(self, batch: dict[str, Any]) -> torch.Tensor:
        logits = self._logits(batch)
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX).to(logits.device)
        # A float32 copy of one sample at a time bounds the memory; unbind, because the gradient of an index
        # is a buffer as large as all logits, once for each row.
        losses = [
            F.cross_entropy(row.float(), target, ignore_index=IGNORE_INDEX, reduction="sum")
            for row, target in zip(logits.unbind(0), targets.unbind(0), strict=True)
        ]
        return torch.stack(losses)


def dummy_vision(model: torch.nn.Module, like: torch.Tensor) -> torch.Tensor:
    """0 x the vision output of one blank image, a scalar of ``like``'s type.

    Added before the language model, it makes every parameter of the vision tower take part in the backward
    pass with a zero gradient. Added to the loss instead, DeepSpeed ZeRO-2 trains wrong without a word.
    """
    visual = model.model.visual
    merge = visual.spatial_merge_size
    config = visual.config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.zeros(merge * merge, width, dtype=visual.dtype, device=like.device)
    output = visual(pixels, grid_thw=torch.tensor([[1, merge, merge]], device=like.device), return_dict=True)
    outputs = [output.pooler_output, *output.deepstack_features]
    return (torch.stack([features.float().sum() for features in outputs]).sum() * 0).to(like.dtype)
