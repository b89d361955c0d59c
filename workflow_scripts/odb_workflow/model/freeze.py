"""Which parameters are trained: three switches for the parts of the model, and keywords on parameter names.

The parts follow LLaMA-Factory's names. For Qwen3-VL: the vision tower is ``visual`` without its mergers, the
projector is ``visual.merger`` and ``visual.deepstack_merger_list``, and the language model is the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..runtime.errors import UserError

logger = logging.getLogger(__name__)

PROJECTOR_NAMES = (
    "visual.merger",
    "deepstack_merger_list",
    "multi_modal_projector",
    "vision_projector",
    "connector",
)
VISION_NAMES = ("visual.", "vision_tower", "vision_model", "image_encoder")


@dataclass(frozen=True)
class FreezeReport:
    """What is trained.

    Attributes:
        trained: Names of the trained parameters, in the model's order.
        trained_parameters: Their number of elements; ``total_parameters`` of all.
        parts: Trained elements of ``vision_tower``, ``projector`` and ``language_model``.
    """

    trained: tuple[str, ...]
    trained_parameters: int
    total_parameters: int
    parts: dict[str, int]

    def __str__(self) -> str:
        share = self.trained_parameters / max(self.total_parameters, 1)
        parts = ", ".join(f"{name} {count:,}" for name, count in self.parts.items())
        counts = f"{self.trained_parameters:,} of {self.total_parameters:,} parameters"
        return f"training {counts} ({share:.1%}): {parts}"


def part_of(name: str) -> str:
    """The part of the model that a parameter name belongs to."""
    if any(piece in name for piece in PROJECTOR_NAMES):
        return "projector"
    if any(piece in name for piece in VISION_NAMES):
        return "vision_tower"
    return "language_model"


def apply_freezing(
    model: torch.nn.Module,
    vision_tower: bool = True,
    projector: bool = True,
    language_model: bool = False,
    trainable_keywords: Sequence[str] = (),
) -> FreezeReport:
    """Set ``requires_grad`` of every parameter.

    Args:
        model: The Hugging Face model.
        vision_tower, projector, language_model: Whether that part is frozen.
        trainable_keywords: With any, exactly the parameters whose name contains one of them are trained,
            within the parts that are not frozen.

    Raises:
        UserError: a keyword that matches no parameter, matches only frozen parts, or nothing left to train.
    """
    frozen = {"vision_tower": vision_tower, "projector": projector, "language_model": language_model}
    keywords = [keyword.strip() for keyword in trainable_keywords if keyword.strip()]
    # remove_duplicate=False: a tied weight is trained under either of its names.
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for keyword in keywords:
        matched = [name for name in names if keyword in name]
        if not matched:
            raise UserError(
                f"trainable keyword {keyword!r} matches no parameter of the model",
                where="training.trainable_keywords",
                fix=f"parameter names look like {names[0]} and {names[-1]}",
            )
        if all(frozen[part_of(name)] for name in matched):
            parts = sorted({part_of(name) for name in matched})
            raise UserError(
                f"trainable keyword {keyword!r} matches only frozen parts ({', '.join(parts)})",
                where="training.trainable_keywords",
                fix=f"set freeze_{parts[0]} to false, or drop the keyword",
            )

    def wanted(name: str) -> bool:
        return not frozen[part_of(name)] and (not keywords or any(keyword in name for keyword in keywords))

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if wanted(name):
            parameter.requires_grad_(True)

    counts = {part: 0 for part in frozen}
    trained = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained.append(name)
            counts[part_of(name)] += _elements(parameter)
    if not trained:
        raise UserError(
            "no parameter is trained: vision tower, projector and language model are all frozen",
            where="training.freeze_language_model",
            fix="set at least one of the freeze switches to false",
        )
    report = FreezeReport(
        trained=tuple(trained),
        trained_parameters=sum(counts.values()),
        total_parameters=sum(_elements(parameter) for parameter in model.parameters()),
        parts=counts,
    )
    logger.info("%s", report)
    return report


def _elements(parameter: torch.nn.Parameter) -> int:
    # Under DeepSpeed ZeRO-3 a parameter is empty on this rank and knows its full size.
    return int(getattr(parameter, "ds_numel", parameter.numel()))
