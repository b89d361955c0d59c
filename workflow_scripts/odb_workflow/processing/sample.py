"""From a record to a sample: the tensors of one conversation with its images, before batching.

Labels: every assistant answer and the end token after it are supervised; everything else is -100, vision
tokens always.

Length rule (``max_length``): a sample that is longer is cut at its end, but only where the part cut off is
text alone and at least one label token stays; otherwise the whole record is refused (``over_length``).
Vision tokens are never cut. The same rule holds for training, validation loss and the measured lengths.
Of a text that no ``max_length`` tokens can hold only the head is tokenized, with the same result.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..runtime.errors import UserError
from ..tmdb.images import BadImage, LoadedImage, Size, read_bytes, read_image, resolve_image_path
from ..tmdb.records import BadRecord, Record
from .template import Rendered, TemplateRenderer
from .vision import PatchMaker, VisionSettings

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
#: odb reads this key of a sample for its ``max_patches`` limit.
PATCHES_KEY = "odb_n_patches"

#: Texts up to this many characters are always tokenized whole.
_WHOLE_CHARACTERS = 1 << 18
_SLACK_CHARACTERS = 1 << 12
#: Tokenizers end a token where a word does: what follows has no say in the tokens before it.
_BOUNDARY = re.compile(r"[^\W_][\s。，、！？；：]")

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token level of one sample: int64 ``[L]``, ``is_image`` bool ``[L]``; ``cut`` tokens were cut off."""

    input_ids: np.ndarray
    labels: np.ndarray
    is_image: np.ndarray
    cut: int

    @property
    def label_tokens(self) -> int:
        """Label tokens that the next-token loss uses: those after the first position."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())


def _tokens_of(span: tuple[int, int], offsets: np.ndarray, text: str) -> slice:
    """The tokens of a character range; ``offsets`` int64 ``[L, 2]``, ascending.

    A token that reaches beyond the range counts when it has white space alone out there: templates that write
    ``ASSISTANT: `` share their last space with the first word of the answer.
    """
    start, end = span
    first = int(np.searchsorted(offsets[:, 1], start, "right"))  # the first token that ends inside
    last = int(np.searchsorted(offsets[:, 0], end, "left"))  # one past the last that begins inside
    if first < last and offsets[first, 0] < start and not text[offsets[first, 0] : start].isspace():
        first += 1
    if first < last and offsets[last - 1, 1] > end and not text[end : offsets[last - 1, 1]].isspace():
        last -= 1
    return slice(first, last)


class SampleProcessor:
    """Turns records into samples with a model's processor.

    Qwen2-VL/Qwen3-VL processors take a direct path that gives the same tensors faster; it is compared with
    the processor once at construction. Any other processor with a fast tokenizer, an ``image_token`` and a
    chat template is called as it is.

    Args:
        processor: The model's processor.
        max_length: Largest number of tokens of a sample, vision tokens included.
        data_dir: The dataset folder that image paths are relative to.
        check_template: Also render each record by itself and compare (the validation does so).
        pixel_dtype: Type of ``pixel_values``; None keeps the processor's float32.

    Raises:
        UserError: the processor has no fast tokenizer or no chat template, or ``max_length`` is below 2.
    """

    def __init__(
        self,
        processor: Any,
        max_length: int,
        data_dir: str | Path,
        *,
        check_template: bool = False,
        pixel_dtype: torch.dtype | None = None,
    ) -> None:
        if max_length < 2:
            raise UserError(f"max_length is {max_length}, it must be at least 2")
        self.processor, self.max_length, self.check_template = processor, int(max_length), check_template
        self.root = os.path.realpath(data_dir)
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None or not tokenizer.is_fast:
            raise UserError(
                "the model's processor has no fast tokenizer", fix="use a vision-language model's processor"
            )
        if not (getattr(processor, "chat_template", None) or tokenizer.chat_template):
            raise UserError(
                "the model's processor has no chat template", fix="use an instruction-tuned model"
            )
        self.renderer = TemplateRenderer(processor)
        if not self.renderer.image_token:
            raise UserError("the model's processor names no image_token: it takes no images")
        self._backend = tokenizer.backend_tokenizer
        # No token stands for more characters than it has, so a longer head has max_length tokens for certain.
        longest = max(map(len, tokenizer.get_vocab()))
        self._head_characters = max(_WHOLE_CHARACTERS, longest * self.max_length + _SLACK_CHARACTERS)
        self.image_token_id = int(tokenizer.convert_tokens_to_ids(self.renderer.image_token))
        self._is_vision = self._vision_table(tokenizer)
        settings = VisionSettings.of(getattr(processor, "image_processor", None))
        self.vision: VisionSettings | None = settings
        self.pixel_dtype = pixel_dtype or torch.float32
        self._patches = PatchMaker(settings, self.pixel_dtype) if settings else None
        if settings and not self._agrees(settings):
            logger.warning("the direct image path differs from the processor; using the processor itself")
            self.vision = self._patches = None

    def _vision_table(self, tokenizer: Any) -> np.ndarray:
        """bool ``[vocabulary]``: tokens that belong to an image block and are neither cut nor supervised."""
        table = np.zeros(max(len(tokenizer), self.image_token_id + 1), dtype=bool)
        table[self.image_token_id] = True
        for name in ("vision_start_token", "vision_end_token", "video_token", "boi_token", "eoi_token"):
            token = getattr(self.processor, name, None)
            number = tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else None
            if isinstance(number, int) and 0 <= number < len(table):
                table[number] = True
        return table

    def _agrees(self, settings: VisionSettings) -> bool:
        """Does the direct path give what the processor gives, on one made-up picture?"""
        from PIL import Image

        rows = np.arange(70 * 90 * 3, dtype=np.int64) * 2654435761 % 251
        picture = Image.fromarray(rows.astype(np.uint8).reshape(70, 90, 3))
        theirs = self.processor.image_processor(images=[picture], return_tensors="pt")
        ours, grid = PatchMaker(settings)(picture, picture.size)
        same_grid = theirs["image_grid_thw"].tolist() == [list(grid)]
        return same_grid and torch.allclose(theirs["pixel_values"].float(), ours, atol=1e-5)

    # Text

    def encode(self, record: Record, row: int, image_tokens: list[int]) -> Encoded:
        """Tokenize once, mark the answers, expand each image token, apply the length rule.

        Args:
            image_tokens: Tokens of each image in order.

        Raises:
            BadRecord: special token in a text, template error, over-length, or no label token.
        """

        def bad(reason: str, detail: str) -> BadRecord:
            return BadRecord(reason, record_id=record.id, row=row, detail=detail)

        whole = self.renderer.render(record, row, check=self.check_template)
        rendered = self._head(whole, bad)
        is_whole = len(rendered.text) == len(whole.text)
        encoding = self._tokenize(rendered.text)
        ids = np.array(encoding.ids, dtype=np.int64)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        if not is_whole:
            # The head's last tokens may differ from those of the whole text: they must lie behind a boundary.
            kept = int(offsets[self.max_length - 1, 1]) if len(ids) >= self.max_length else len(whole.text)
            if not _BOUNDARY.search(rendered.text, kept):
                raise bad("over_length", f"{len(whole.text)} characters without the end of a word to cut at")
        is_image = ids == self.image_token_id
        if int(is_image.sum()) != len(image_tokens):
            raise bad(
                "template_error",
                f"{int(is_image.sum())} image tokens in the text, {len(image_tokens)} images",
            )
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        for span in rendered.spans:
            inside = _tokens_of(span, offsets, rendered.text)
            labels[inside] = ids[inside]
        labels[self._is_vision[ids]] = IGNORE_INDEX
        if image_tokens:
            repeats = np.ones(len(ids), dtype=np.int64)
            repeats[is_image] = image_tokens
            ids, labels, is_image = (np.repeat(values, repeats) for values in (ids, labels, is_image))
        return self._fit(Encoded(ids, labels, is_image, 0), bad, is_whole)

    def _head(self, rendered: Rendered, bad: Callable[[str, str], BadRecord]) -> Rendered:
        """What of a rendered text is tokenized: all of it, or of an enormous one the head that decides."""
        text, end = rendered.text, self._head_characters
        if len(text) <= end:
            return rendered
        if self.renderer.image_token in text[end - len(self.renderer.image_token) + 1 :]:
            detail = f"{len(text)} characters, max_length is {self.max_length} tokens"
            raise bad("over_length", f"{detail}; cutting would reach into an image")
        spans = tuple((start, min(stop, end)) for start, stop in rendered.spans if start < end)
        return Rendered(text[:end], spans)

    def _tokenize(self, text: str) -> Any:
        backend = self._backend
        # A tokenizer file may hold these, and another caller's `truncation=True` leaves them set.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        return backend.encode(text)

    def _fit(self, encoded: Encoded, bad: Callable[[str, str], BadRecord], is_whole: bool) -> Encoded:
        """Apply the length rule of the module."""
        length, limit = len(encoded.input_ids), self.max_length
        if length > limit:
            more = "" if is_whole else "more than "
            detail = f"{more}{length} tokens ({int(encoded.is_image.sum())} of images), max_length is {limit}"
            if self._is_vision[encoded.input_ids[limit:]].any():
                raise bad("over_length", f"{detail}; cutting would reach into an image")
            encoded = Encoded(
                encoded.input_ids[:limit], encoded.labels[:limit], encoded.is_image[:limit], length - limit
            )
            if encoded.label_tokens == 0:
                raise bad("over_length", f"{detail}; cutting would leave no label token")
        if encoded.label_tokens == 0:
            raise bad("no_label_tokens", "no token of an answer is supervised")
        return encoded

    # Images

    def needed(self, width: int, height: int) -> Size:
        """The size an image is resized to; what the reader may decode a large JPEG down to."""
        return self.vision.resized(width, height) if self.vision else (width, height)

    def load_image(self, record: Record, row: int, path: str) -> LoadedImage:
        """Read one image of a record.

        Raises:
            BadRecord: the reader refuses it, or its shape is too extreme; names the file.
        """
        try:
            loaded = read_image(read_bytes(resolve_image_path(self.root, path)), self.needed)
            self.needed(*loaded.size)
        except BadImage as error:
            raise BadRecord(
                error.reason, record_id=record.id, row=row, detail=error.detail, file=path
            ) from error
        return loaded

    # Samples

    def __call__(self, record: Record, row: int) -> Sample:
        """The sample of a record.

        Returns:
            ``row`` int; ``input_ids``, ``attention_mask``, ``labels``, ``mm_token_type_ids`` int64 ``[L]``
            (0 text, 1 image); with images ``pixel_values`` ``[P, D]`` and ``image_grid_thw`` int64
            ``[n, 3]``;
            ``odb_n_patches`` int.

        Raises:
            BadRecord: the record cannot become a sample; names id, row, reason and file.
        """
        return self.from_images(record, row, [self.load_image(record, row, path) for path in record.images])

    def from_images(self, record: Record, row: int, images: list[LoadedImage]) -> Sample:
        """The sample of a record whose images are read already."""
        if self._patches is None:
            return self._generic(record, row, images)
        blocks, grids = [], []
        for loaded in images:
            block, grid = self._patches(loaded.image, loaded.size)
            blocks.append(block)
            grids.append(grid)
        encoded = self.encode(record, row, [self.vision.tokens(grid) for grid in grids])
        sample = self._tensors(encoded, row)
        if grids:
            sample["pixel_values"] = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
            sample["image_grid_thw"] = torch.tensor(grids, dtype=torch.int64)
            sample[PATCHES_KEY] = len(sample["pixel_values"])
        return sample

    @staticmethod
    def _tensors(encoded: Encoded, row: int) -> Sample:
        ids = torch.from_numpy(np.ascontiguousarray(encoded.input_ids))
        return {
            "row": row,
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": torch.from_numpy(np.ascontiguousarray(encoded.labels)),
            "mm_token_type_ids": torch.from_numpy(encoded.is_image.astype(np.int64)),
            PATCHES_KEY: 0,
        }

    def _generic(self, record: Record, row: int, images: list[LoadedImage]) -> Sample:
        """Through the processor as it is; labels by its own token offsets."""
        rendered = self.renderer.render(record, row, check=self.check_template)
        rendered = self._head(
            rendered, lambda reason, detail: BadRecord(reason, record_id=record.id, row=row, detail=detail)
        )
        try:
            pictures = [loaded.image for loaded in images] or None
            output = self.processor(text=[rendered.text], images=pictures, return_tensors="pt")
        except Exception as error:  # processors raise whatever they like on a picture they cannot take
            detail = f"{type(error).__name__}: {error}"[:300]
            raise BadRecord("processor_error", record_id=record.id, row=row, detail=detail) from error
        full = output["input_ids"][0].numpy()
        counts = self._image_runs(full, len(images), record, row)
        encoded = self.encode(record, row, counts)
        uncut = np.concatenate([encoded.input_ids, full[len(encoded.input_ids) :]])
        if not np.array_equal(uncut, full):
            detail = "the processor's tokens differ from the template's text with expanded images"
            raise BadRecord("processor_error", record_id=record.id, row=row, detail=detail)
        sample = self._tensors(encoded, row)
        skip = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
        sample.update(
            {key: value for key, value in output.items() if key not in skip and torch.is_tensor(value)}
        )
        if "pixel_values" in sample:
            sample["pixel_values"] = sample["pixel_values"].to(self.pixel_dtype)
            sample[PATCHES_KEY] = len(sample["pixel_values"])
        return sample

    def _image_runs(self, ids: np.ndarray, n_images: int, record: Record, row: int) -> list[int]:
        """Image tokens of each image, from runs of the image token."""
        marks = np.flatnonzero(
            np.diff(np.concatenate([[0], (ids == self.image_token_id).astype(np.int8), [0]]))
        )
        runs = (marks[1::2] - marks[0::2]).tolist()
        if len(runs) != n_images:
            detail = (
                f"{len(runs)} runs of image tokens for {n_images} images: this processor is not supported"
            )
            raise BadRecord("processor_error", record_id=record.id, row=row, detail=detail)
        return runs
