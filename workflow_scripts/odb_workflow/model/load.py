"""Models and processors from a directory or the Hugging Face hub, with errors that name the mistake."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from ..runtime.errors import UserError
from .identity import PROCESSOR_FILES

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Types of the precisions by their name in configuration and flags."""


def load_model(
    path_or_id: str | Path,
    dtype: torch.dtype | str = torch.bfloat16,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    revision: str | None = None,
    offline: bool | None = None,
) -> torch.nn.Module:
    """A vision-language model on the host, in evaluation mode.

    Args:
        path_or_id: Directory with ``config.json`` and weights, or a hub id.
        dtype: Type of the weights, or ``auto`` for the checkpoint's.
        attn_implementation: transformers' name of an attention implementation; None is its default (sdpa).
        revision: Commit or tag of a hub id.
        offline: Use local files only; None follows HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE.

    Raises:
        UserError: not found, no checkpoint, weights missing or damaged, or no vision-language model.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    name = check_model_path(path_or_id)
    hub = {
        "revision": revision,
        "local_files_only": _offline(offline),
        "trust_remote_code": trust_remote_code,
    }
    config = _guarded(name, "configuration", lambda: AutoConfig.from_pretrained(name, **hub))
    if not hasattr(config, "vision_config"):
        raise UserError(
            f"{name} is a {config.model_type} model without image support",
            where="model.path",
            fix="choose a vision-language model, for example Qwen/Qwen3-VL-2B-Instruct",
        )
    attention = (
        {} if attn_implementation in (None, "", "auto") else {"attn_implementation": attn_implementation}
    )
    loaded = _guarded(
        name,
        "weights",
        lambda: AutoModelForImageTextToText.from_pretrained(
            name, config=config, dtype=dtype, output_loading_info=True, **attention, **hub
        ),
    )
    model, info = loaded
    missing = sorted(info.get("missing_keys") or [])
    if missing:
        raise UserError(
            f"{name} lacks {len(missing)} weights of a {config.model_type} model, the first is {missing[0]}",
            where=str(name),
            fix="the checkpoint is incomplete or of another model; save or download it again",
        )
    return model.eval()


def load_processor(
    path: str | Path,
    image_max_pixels: int | None = None,
    fallback: str | Path | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    offline: bool | None = None,
) -> Any:
    """The processor (tokenizer and image processor) of a model.

    Args:
        path: Directory or hub id.
        image_max_pixels: Upper bound of an image's pixels after resizing; None keeps the processor's own.
        fallback: Where to take the processor from when ``path`` has none (a checkpoint saved without it).

    Raises:
        UserError: no processor in either place.
    """
    from transformers import AutoProcessor

    name = check_model_path(path)
    if fallback is not None and os.path.isdir(name) and not _has_processor(name):
        logger.warning("%s has no processor files; using the processor of %s", name, fallback)
        name = check_model_path(fallback)
    processor = _guarded(
        name,
        "processor",
        lambda: AutoProcessor.from_pretrained(
            name,
            revision=revision if name == str(path) else None,
            local_files_only=_offline(offline),
            trust_remote_code=trust_remote_code,
        ),
    )
    if not hasattr(processor, "image_processor"):
        raise UserError(
            f"the processor of {name} handles no images", where=name, fix="choose a vision-language model"
        )
    if image_max_pixels is not None:
        set_image_max_pixels(processor, image_max_pixels)
    return processor


def set_image_max_pixels(processor: Any, image_max_pixels: int) -> None:
    """Bound an image's pixels after resizing (``longest_edge`` of Qwen's image processors is an area).

    Raises:
        UserError: below one merged patch, or an image processor that is not bounded by area.
    """
    images = processor.image_processor
    size = dict(images.size) if getattr(images, "size", None) else {}
    smallest = (int(getattr(images, "patch_size", 1)) * int(getattr(images, "merge_size", 1))) ** 2
    if "longest_edge" not in size:
        raise UserError(
            f"{type(images).__name__} is not bounded by an area, so image_max_pixels cannot be applied",
            where="model.image_max_pixels",
            fix="set image_max_pixels to null",
        )
    if image_max_pixels < smallest:
        raise UserError(
            f"image_max_pixels is {image_max_pixels}, less than one image token ({smallest} pixels)",
            where="model.image_max_pixels",
            fix=f"set it to {smallest} or more",
        )
    images.size = {
        "longest_edge": image_max_pixels,
        "shortest_edge": min(int(size.get("shortest_edge") or smallest), image_max_pixels),
    }


def pad_token_id(processor: Any) -> int:
    """The token that fills ``input_ids``: the tokenizer's padding token, else its end token.

    Raises:
        UserError: the tokenizer has neither.
    """
    tokenizer = processor.tokenizer
    token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise UserError(
            "the tokenizer has neither a padding token nor an end token",
            where="tokenizer_config.json of the model",
            fix="set pad_token there",
        )
    return int(token)


def check_model_path(path_or_id: str | Path) -> str:
    """The name to load by: an existing model directory, or what may be a hub id.

    Raises:
        UserError: a path that does not exist, or a directory without ``config.json``.
    """
    name = str(path_or_id)
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file() and not _has_processor(name):
            raise UserError(
                f"{name} is no model directory: it has no config.json",
                where=name,
                fix="give a directory written by save_pretrained, or a hub id such as "
                "Qwen/Qwen3-VL-2B-Instruct",
            )
        return name
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or path.exists()
    if looks_local:
        raise UserError(
            f"no model directory {name}", where=name, fix="check the path, or give a hub id OWNER/NAME"
        )
    return name


def _has_processor(directory: str) -> bool:
    return any((Path(directory) / file).is_file() for file in PROCESSOR_FILES)


def _offline(offline: bool | None) -> bool:
    if offline is not None:
        return offline
    return any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in _OFFLINE_VARIABLES)


_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def _guarded(name: str, what: str, load: Any) -> Any:
    """Run a transformers loader; its what it raises becomes one sentence with a remedy."""
    from safetensors import SafetensorError

    try:
        return load()
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        text = str(error)
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        if "trust_remote_code" in text:
            fix = "set trust_remote_code to true if you trust the code in that repository"
        elif os.path.isdir(name):
            fix = "the directory is incomplete or damaged; save or download it again"
        else:
            fix = "check the id and the network; with HF_HUB_OFFLINE=1 the model must be in the local cache"
        raise UserError(f"cannot load the {what} of {name}: {first}", where=name, fix=fix) from error
