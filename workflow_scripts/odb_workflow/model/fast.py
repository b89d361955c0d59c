"""Qwen3-VL's forward without what the transformers forward spends outside its layers.

The layers are transformers' own modules; around them, embeddings are written once, images go through the
vision tower in one piece with tables made on the host, no mask is built, and the final norm runs on the
tokens that are asked for. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from . import compat
from .positions import vision_tables


@dataclass(frozen=True)
class FastSwitches:
    """The resolved switches that :class:`FastQwen3VL` reads; see ``PerformanceSettings``."""

    varlen_text: bool
    varlen_vision: bool
    host_positions: bool
    no_mask: bool
    linear_patch_embedding: bool
    frozen_vision_without_graph: bool
    vision_trained: bool


class FastQwen3VL:
    """Hidden states of a Qwen3-VL model for one collated batch.

    Args:
        model: ``Qwen3VLForConditionalGeneration`` whose attention names were set by the caller.
        switches: What is in use.
        recomputed_layers: From the tokens of a batch to the numbers of the layers to be checkpointed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        switches: FastSwitches,
        recomputed_layers: Callable[[int], frozenset[int]],
    ) -> None:
        self.model = model
        self.switches = switches
        self.recomputed_layers = recomputed_layers

    def hidden(self, batch: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states [K, H] at ``positions`` int64 [K] of the flattened batch."""
        language = self.model.model.language_model
        height, width = batch["input_ids"].shape
        states, features = self._embed(batch)
        states = states.view(height, width, -1)
        rotary = language.rotary_emb(states, self._positions(batch))
        arguments = {"position_embeddings": rotary, **self._attention(batch, states)}
        recomputed = self.recomputed_layers(height * width) if torch.is_grad_enabled() else frozenset()
        for number, layer in enumerate(language.layers):
            if number in recomputed:
                states = checkpoint(layer, states, use_reentrant=False, preserve_rng_state=False, **arguments)
            else:
                states = layer(states, **arguments)
            if number < len(features):
                flat = states.view(height * width, -1)
                added = features[number].to(flat.dtype)
                states = flat.index_add(0, batch["image_positions"], added).view(height, width, -1)
        # The norm works on each token by itself, so it need not see the others.
        return language.norm(states.view(height * width, -1).index_select(0, positions))

    def _embed(self, batch: dict[str, Any]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Input embeddings [B * L, H] and the deepstack features, one [images' tokens, H] per early layer."""
        embedding = self.model.get_input_embeddings()
        tokens = batch["input_ids"].view(-1)
        text = embedding(tokens.index_select(0, batch["text_positions"]))
        states = text.new_zeros(tokens.numel(), text.shape[-1])
        features: Sequence[torch.Tensor] = ()
        if "pixel_values" in batch:
            with self._vision_graph():
                image, features = self._vision(batch, batch["pixel_values"])
                states = states.index_copy(0, batch["image_positions"], image.to(states.dtype))
        elif self.switches.vision_trained and torch.is_grad_enabled():
            image, features = self._vision(self._blank_image(text.device), None)
            total = torch.stack([part.float().sum() for part in (image, *features)]).sum()
            text = text + (total * 0).to(text.dtype)
            features = ()
        return states.index_copy(0, batch["text_positions"], text), features

    def _vision(
        self, tables: dict[str, Any], pixels: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Merged features [tokens, H] of all images and the deepstack features, each [tokens, H]."""
        visual = self.model.model.visual
        pixels = tables["pixel_values"] if pixels is None else pixels
        states = self._patch_embedding(visual.patch_embed, pixels)
        if "vision_interp_indices" in tables and self.switches.host_positions:
            indices, weights = tables["vision_interp_indices"], tables["vision_interp_weights"]
        else:
            made = vision_tables(
                tables["image_grid_thw"].cpu(), visual.num_grid_per_side, visual.spatial_merge_size
            )
            indices = made["vision_interp_indices"].to(states.device)
            weights = made["vision_interp_weights"].to(states.device)
            if not self.switches.host_positions:
                tables = {**tables, **{k: _to(v, states.device) for k, v in made.items()}}
        table = (visual.pos_embed(indices) * weights[:, :, None]).sum(1)
        states = states + table.to(states.dtype)
        arguments = {
            "cu_seqlens": tables["vision_cu_seqlens"],
            "max_seqlen": tables["vision_max_seqlen"],
            "position_embeddings": compat.vision_rotary(visual)(states, tables["vision_position_ids"]),
        }
        if not self.switches.varlen_vision:
            arguments["segment_lengths"] = tables["vision_segment_lengths"]
        features = []
        for number, block in enumerate(visual.blocks):
            states = block(states, **arguments)
            if number in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(number)]
                features.append(merger(states))
        return visual.merger(states), features

    def _patch_embedding(self, module: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        weight = module.proj.weight
        if not self.switches.linear_patch_embedding:
            return module(pixels.to(weight.dtype))
        # Kernel and stride are equal, so the convolution is one matrix product over the flattened patch.
        return F.linear(pixels.to(weight.dtype), weight.flatten(1), module.proj.bias)

    def _positions(self, batch: dict[str, Any]) -> torch.Tensor:
        if self.switches.host_positions or "cu_seqlens" in batch:
            return batch["position_ids"]
        positions, _ = self.model.model.get_rope_index(
            batch["input_ids"],
            mm_token_type_ids=batch["mm_token_type_ids"],
            image_grid_thw=batch.get("image_grid_thw"),
            attention_mask=batch["attention_mask"],
        )
        return positions

    def _attention(self, batch: dict[str, Any], states: torch.Tensor) -> dict[str, Any]:
        if "cu_seqlens" in batch:
            if self.switches.varlen_text:
                return {
                    "attention_mask": None,
                    "segment_cu_seqlens": batch["cu_seqlens"],
                    "segment_max_seqlen": batch["max_seqlen"],
                }
            return {"attention_mask": None, "segment_lengths": batch["segment_lengths"]}
        if self.switches.no_mask:
            return {"attention_mask": None, "causal_rows": True}
        width = states.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=states.device).tril()
        return {"attention_mask": causal & batch["attention_mask"].bool()[:, None, None, :]}

    def _vision_graph(self) -> contextlib.AbstractContextManager[Any]:
        if self.switches.frozen_vision_without_graph and not self.switches.vision_trained:
            return torch.no_grad()
        return contextlib.nullcontext()

    def _blank_image(self, device: torch.device) -> dict[str, Any]:
        visual = self.model.model.visual
        merge, config = visual.spatial_merge_size, visual.config
        grid = torch.tensor([[1, merge, merge]])
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        tables = vision_tables(grid, visual.num_grid_per_side, merge)
        return {
            "image_grid_thw": grid,
            "pixel_values": torch.zeros(merge * merge, width, device=device),
            **{name: _to(value, device) for name, value in tables.items()},
        }


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
