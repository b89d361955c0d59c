"""Which parameters are trained, and refusals."""

from __future__ import annotations

import pytest
from odb_workflow.model.freeze import apply_freezing, part_of
from odb_workflow.runtime.errors import UserError
from tiny_qwen3_vl import tiny_model


def trained(model: object) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_parts_of_qwen3_vl() -> None:
    assert part_of("model.visual.blocks.0.attn.qkv.weight") == "vision_tower"
    assert part_of("model.visual.merger.norm.weight") == "projector"
    assert part_of("model.visual.deepstack_merger_list.1.linear_fc1.bias") == "projector"
    assert part_of("model.language_model.layers.3.mlp.up_proj.weight") == "language_model"
    assert part_of("lm_head.weight") == "language_model"


def test_published_recipe_trains_the_language_model_alone() -> None:
    model = tiny_model()
    report = apply_freezing(model, vision_tower=True, projector=True, language_model=False)
    assert trained(model) == {name for name, _ in model.named_parameters() if "visual" not in name}
    assert report.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.parts["vision_tower"] == report.parts["projector"] == 0
    assert set(report.trained) == trained(model)
    assert "training" in str(report)


def test_freezing_twice_starts_afresh() -> None:
    model = tiny_model()
    apply_freezing(model, vision_tower=False, projector=True, language_model=True)
    assert all("visual" in name and "merger" not in name for name in trained(model))
    apply_freezing(model, vision_tower=True, projector=False, language_model=True)
    assert all("merger" in name for name in trained(model))


def test_keywords_choose_parameters() -> None:
    model = tiny_model()
    apply_freezing(model, trainable_keywords=["layers.3.", " lm_head "])
    # lm_head is tied to the embedding, which is the name that carries the parameter
    names = trained(model)
    assert "model.language_model.embed_tokens.weight" in names
    assert all("layers.3." in name or "embed_tokens" in name for name in names)
    assert len(names) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainable_keywords": ["no_such_layer"]}, "'no_such_layer' matches no parameter"),
        ({"trainable_keywords": ["layers.0", "visual.blocks"]}, "'visual.blocks' matches only frozen parts"),
        ({"language_model": True}, "no parameter is trained"),
    ],
)
def test_nothing_to_train_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_freezing(tiny_model(), **arguments)
