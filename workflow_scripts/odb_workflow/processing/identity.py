"""What of a processor decides a sample, as one checksum."""

from __future__ import annotations

import hashlib
import json
from typing import Any

#: Keys of processor configurations that name places or versions, not behavior.
_IGNORED = ("_name_or_path", "name_or_path", "_processor_class", "processor_class", "transformers_version")


def processor_identity(processor: Any) -> dict[str, str]:
    """Class name and SHA-256 over tokenizer, chat template and image settings.

    Equal for copies of one processor in different folders; another ``image_max_pixels`` gives another
    checksum.
    """
    tokenizer = processor.tokenizer
    image_settings: dict[str, Any] = {}
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is not None:
        image_settings = {
            key: value for key, value in image_processor.to_dict().items() if key not in _IGNORED
        }
    template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    digest = hashlib.sha256()
    for part in (
        type(processor).__name__,
        json.dumps(template, sort_keys=True),
        json.dumps(image_settings, sort_keys=True, default=str),
        tokenizer.backend_tokenizer.to_str(),
    ):
        digest.update(part.encode() + b"\0")
    return {"class": type(processor).__name__, "sha256": digest.hexdigest()}
