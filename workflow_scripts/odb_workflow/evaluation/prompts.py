"""Rendered prompts to samples: tokens with expanded image places, and pixels, ready for the collator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from odb_workflow.processing.sample import IGNORE_INDEX
from odb_workflow.processing.vision import PatchMaker, VisionSettings
from odb_workflow.runtime.errors import UserError
from odb_workflow.tmdb.images import LoadedImage, Size, read_image

from .mmmu_protocol import Question, RowError


def render(processor: Any, question: Question) -> str:
    """The prompt as the model sees it, image places not yet expanded.

    Raises:
        UserError: the chat template fails.
        RowError: the text holds a token that stands for an image, so that places and images would not match.
    """
    try:
        text = processor.apply_chat_template(question.messages(), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # Jinja templates are programs of their own
        raise UserError(
            f"the chat template fails: {type(error).__name__}: {error}",
            where=f"sample {question.sample_id}",
            fix="check chat_template of the checkpoint's processor",
        ) from error
    places, images = text.count(processor.image_token), len(question.images)
    if places != images:
        detail = f"the prompt has {places} image places for {images} images: its text holds a control token"
        raise RowError(question.sample_id, "control_token_in_text", detail)
    return text


class PromptEncoder:
    """Turns a rendered prompt and its images into a sample without labels.

    For Qwen's image processors the direct path of ``processing.vision`` is used, after it has been compared
    with the processor once; any other processor is called as it is.

    Args:
        processor: The model's processor, with ``image_token``.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.image_token_id = int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))
        self.settings = VisionSettings.of(processor.image_processor)
        self._patches = PatchMaker(self.settings) if self.settings else None
        if self.settings and not self._agrees():
            self.settings = self._patches = None

    def _agrees(self) -> bool:
        from PIL import Image

        values = np.arange(70 * 90 * 3, dtype=np.int64) * 2654435761 % 251
        picture = Image.fromarray(values.astype(np.uint8).reshape(70, 90, 3))
        text = f"a{self.processor.image_token}b"
        ours, theirs = (
            self._direct(text, [picture], [picture.size], 0),
            self._through_processor(text, [picture], 0),
        )
        return all(
            torch.equal(ours[name], theirs[name]) if not ours[name].is_floating_point()
            else torch.allclose(ours[name], theirs[name].float(), atol=1e-5)
            for name in ("input_ids", "mm_token_type_ids", "image_grid_thw", "pixel_values")
        )  # fmt: skip

    def read(self, source: Any) -> LoadedImage:
        """Read one image; a large JPEG may be decoded at a fraction of its size.

        Raises:
            BadImage: it cannot be read, or its shape is too extreme for the image processor.
        """
        loaded = read_image(source, self.settings.resized if self.settings else None)
        if self.settings:
            self.settings.resized(*loaded.size)
        return loaded

    def length(self, rendered: str, images: Sequence[LoadedImage]) -> int:
        """Tokens of the prompt with its image places expanded."""
        if self.settings is None:
            return len(self._through_processor(rendered, [loaded.image for loaded in images], 0)["input_ids"])
        grids = [self.settings.grid(*loaded.size) for loaded in images]
        return len(self._tokens(rendered)) + sum(self.settings.tokens(grid) - 1 for grid in grids)

    def encode(self, rendered: str, images: Sequence[LoadedImage], row: int) -> dict[str, Any]:
        """The sample: int64 ``[L]`` tokens, mask, labels (-100 all), token types; pixels and grid with
        images.
        """
        pictures = [loaded.image for loaded in images]
        if self.settings is None:
            return self._through_processor(rendered, pictures, row)
        return self._direct(rendered, pictures, [loaded.size for loaded in images], row)

    def _tokens(self, rendered: str) -> np.ndarray:
        return np.asarray(
            self.processor.tokenizer(rendered, add_special_tokens=False)["input_ids"], dtype=np.int64
        )

    def _direct(
        self, rendered: str, pictures: Sequence[Any], sizes: Sequence[Size], row: int
    ) -> dict[str, Any]:
        ids = self._tokens(rendered)
        made = [self._patches(picture, size) for picture, size in zip(pictures, sizes, strict=True)]
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[ids == self.image_token_id] = [self.settings.tokens(grid) for _, grid in made]
        sample = self._sample(torch.from_numpy(np.repeat(ids, repeats)), row)
        if made:
            sample["pixel_values"] = torch.cat([pixels for pixels, _ in made])
            sample["image_grid_thw"] = torch.tensor([grid for _, grid in made], dtype=torch.int64)
        return sample

    def _through_processor(self, rendered: str, pictures: Sequence[Any], row: int) -> dict[str, Any]:
        inputs = self.processor(text=[rendered], images=list(pictures) or None, return_tensors="pt")
        sample = self._sample(inputs["input_ids"][0], row)
        for name in ("pixel_values", "image_grid_thw"):
            if name in inputs:
                sample[name] = inputs[name]
        return sample

    def _sample(self, ids: torch.Tensor, row: int) -> dict[str, Any]:
        return {
            "row": row,
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": torch.full_like(ids, IGNORE_INDEX),
            "mm_token_type_ids": (ids == self.image_token_id).long(),
        }
