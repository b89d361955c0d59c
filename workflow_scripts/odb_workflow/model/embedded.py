"""The embedded model: Qwen3-VL's real architecture at a tiny size, so that the whole pipeline runs on a CPU.

The tokenizer is a byte-level BPE trained on the texts given, with Qwen3-VL's pre-tokenization, special tokens
and turn format. The result is an ordinary Hugging Face directory: ``AutoProcessor`` and
``AutoModelForImageTextToText`` load it offline, and nothing in this project treats it differently from a
pretrained checkpoint.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import UserError
from ..runtime.files import atomic_directory

if TYPE_CHECKING:  # heavy imports stay inside the functions: `--help` must not load torch
    from transformers import PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLProcessor

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    VISION_START,
    VISION_END,
    "<|vision_pad|>",
    IMAGE_PAD,
    VIDEO_PAD,
)

# Same turns as Qwen3-VL's template (no default system turn), without its tool and reasoning parts.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'video' or 'video' in part -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in part -%}{{- part.text -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# Mean and deviation of the embedded pictures (easy-VQA: 0.90 and 0.19, mostly light ground). With Qwen3-VL's
# 0.5 and 0.5 the ground drowns the shapes: colors stayed near chance after 9,000 questions; with these values
# 0.9 of them were read right after 12,000.
IMAGE_MEAN = [0.9, 0.9, 0.9]
IMAGE_STD = [0.2, 0.2, 0.2]
# Qwen3-VL's own lower limit is 65,536 pixels; this one keeps a 64x64 picture at 64x64 (4 tokens).
MIN_IMAGE_PIXELS = 1024
MAX_IMAGE_PIXELS = 16_777_216
# Largest sequence the model accepts (rotary embeddings need no table, so this costs nothing).
MAX_POSITIONS = 32_768


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE with Qwen3-VL's pre-tokenization on ``texts`` and add its special tokens.

    Args:
        texts: Training text; may be a generator.
        vocab_size: Upper limit of learned entries, the 256 bytes included, special tokens not.

    Returns:
        A tokenizer whose special tokens have the highest ids, as in Qwen3-VL.
    """
    from tokenizers import AddedToken, Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    plain = Qwen2Tokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE())
    learner.normalizer, learner.pre_tokenizer, learner.decoder = (
        plain.normalizer,
        plain.pre_tokenizer,
        plain.decoder,
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[
            tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ", 1)) for pair in learned["merges"]
        ],
        unk_token=None,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def build_processor(
    tokenizer: PreTrainedTokenizerBase, *, patch_size: int = 16, merge_size: int = 2
) -> Qwen3VLProcessor:
    """Qwen3-VL's processor around ``tokenizer``, with the lower pixel limit of the embedded model."""
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    shared = {
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": merge_size,
        "image_mean": IMAGE_MEAN,
        "image_std": IMAGE_STD,
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": MIN_IMAGE_PIXELS, "longest_edge": MAX_IMAGE_PIXELS}, **shared
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**shared),
        chat_template=CHAT_TEMPLATE,
    )


def embedded_config(
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_layers: int,
    text_hidden_size: int,
    text_heads: int,
    text_kv_heads: int,
    vision_layers: int,
    vision_hidden_size: int,
    vision_heads: int,
    patch_size: int,
    merge_size: int,
    text_initializer_range: float,
    vision_initializer_range: float,
) -> Qwen3VLConfig:
    """A ``Qwen3VLConfig`` of the given sizes whose token ids are those of ``tokenizer``.

    Raises:
        UserError: sizes that the architecture cannot take (head size not a multiple of 4).
    """
    from transformers import Qwen3VLConfig

    text_head_size, vision_head_size = text_hidden_size // text_heads, vision_hidden_size // vision_heads
    for name, hidden, heads, head_size in (
        ("text", text_hidden_size, text_heads, text_head_size),
        ("vision", vision_hidden_size, vision_heads, vision_head_size),
    ):
        if hidden % heads or head_size % 4:
            raise UserError(
                f"{name} hidden size {hidden} with {heads} heads: the head size is no multiple of 4",
                fix=f"choose a {name} hidden size that is a multiple of {4 * heads}",
            )
    # The rotary half is shared out to time, height and width as in Qwen3-VL (24, 20, 20 of 64).
    half = text_head_size // 2
    spatial = half * 5 // 16
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": text_hidden_size,
            "intermediate_size": 3 * text_hidden_size,
            "num_hidden_layers": text_layers,
            "num_attention_heads": text_heads,
            "num_key_value_heads": text_kv_heads,
            "head_dim": text_head_size,
            "max_position_embeddings": MAX_POSITIONS,
            "initializer_range": text_initializer_range,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [half - 2 * spatial, spatial, spatial],
                "mrope_interleaved": True,
            },
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": ids[TURN_END],
            "pad_token_id": ids[END_OF_TEXT],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": vision_layers,
            "hidden_size": vision_hidden_size,
            "intermediate_size": 4 * vision_hidden_size,
            "num_heads": vision_heads,
            "patch_size": patch_size,
            "temporal_patch_size": 2,
            "spatial_merge_size": merge_size,
            "out_hidden_size": text_hidden_size,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": list(range(min(vision_layers, text_layers)))[-2:],
            "initializer_range": vision_initializer_range,
        },
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
    )


def build_embedded_model(
    texts: Iterable[str],
    output_dir: str | Path,
    *,
    vocab_size: int = 2048,
    text_layers: int = 2,
    text_hidden_size: int = 128,
    text_heads: int = 4,
    text_kv_heads: int = 2,
    vision_layers: int = 2,
    vision_hidden_size: int = 64,
    vision_heads: int = 4,
    patch_size: int = 16,
    merge_size: int = 2,
    text_initializer_range: float = 0.08,
    vision_initializer_range: float = 0.1,
    seed: int = 42,
) -> dict[str, Any]:
    """Write a randomly initialized tiny Qwen3-VL with its tokenizer and processor to ``output_dir``.

    The folder appears whole or not at all and replaces what stood there. Weights depend on ``seed`` alone;
    the caller's random state is left as it was.

    Args:
        texts: Text that the tokenizer is trained on.
        output_dir: The Hugging Face directory to write.
        vocab_size: Learned vocabulary entries before the special tokens.
        text_initializer_range: Standard deviation of the language model's initial weights. With
            transformers' default of 0.02 a model of this size learns text priors only, never the image.
        vision_initializer_range: The same for the vision tower.

    Returns:
        ``{"parameters", "vocab_size", "seed"}`` of what was written.

    Raises:
        UserError: no text, or sizes that the architecture cannot take.
    """
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    texts = iter(texts)
    first = next(texts, None)
    if first is None:
        raise UserError("no text to train the tokenizer on", fix="give a TMDB with at least one record")
    tokenizer = train_tokenizer(itertools.chain([first], texts), vocab_size)
    config = embedded_config(
        tokenizer,
        text_layers=text_layers,
        text_hidden_size=text_hidden_size,
        text_heads=text_heads,
        text_kv_heads=text_kv_heads,
        vision_layers=vision_layers,
        vision_hidden_size=vision_hidden_size,
        vision_heads=vision_heads,
        patch_size=patch_size,
        merge_size=merge_size,
        text_initializer_range=text_initializer_range,
        vision_initializer_range=vision_initializer_range,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(
        bos_token_id=config.text_config.bos_token_id,
        eos_token_id=[config.text_config.eos_token_id, config.text_config.pad_token_id],
        pad_token_id=config.text_config.pad_token_id,
    )
    with atomic_directory(output_dir) as folder:
        model.save_pretrained(folder)
        build_processor(tokenizer, patch_size=patch_size, merge_size=merge_size).save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info("embedded model: %.2f M parameters, %d tokens", parameters / 1e6, len(tokenizer))
    return {"parameters": parameters, "vocab_size": len(tokenizer), "seed": seed}
