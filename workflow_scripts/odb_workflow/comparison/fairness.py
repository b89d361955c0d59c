"""What each arm really ran with, and a warning for each thing that differs other than batching."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .collect import UNTRAINED, ArmResult

# What an arm is allowed to change: that is what the comparison measures.
BATCHING_KEYS = (
    "loader",
    "padding",
    "token_budget",
    "buffer_size",
    "fixed_batch_size",
    "join",
    "no_warmup_buffer",
    "group_order_flip",
    "max_patches",
    "num_workers",
    "prefetch_factor",
)
# Consequences of batching: shown, expected to differ, no warning.
OUTCOME_KEYS = (
    "emitted_samples",
    "real_tokens",
    "padded_tokens",
    "label_tokens",
    "optimizer_steps",
    "skipped_steps",
    "over_budget_samples",
    "resumed_at_step",
)
# Must be equal for the comparison to be about batching alone.
EQUAL_KEYS = (
    "schedule_basis",
    "loss_scaling",
    "device",
    "precision",
    "world_size",
    "deepspeed_stage",
    "gradient_accumulation_steps",
    "lr",
    "lr_scheduler",
    "warmup_ratio",
    "weight_decay",
    "max_grad_norm",
    "epochs",
    "ending",
    "seed",
    "model",
    "code_version",
)
# Shown; where it differs, a note: a commit may have changed nothing that matters, `code_version` says that.
NOTED_KEYS = ("git_commit",)
# Follows from the memory that happened to be free; changes no number.
HARMLESS_KEYS = ("performance_switches.loss_chunk_tokens",)
NESTED_KEYS = ("performance_switches", "versions", "split", "trained")
# Counts that must agree: a different number of samples or label tokens is a different amount of training.
SAME_WORK = ("emitted_samples", "real_tokens", "label_tokens")
WORK_TOLERANCE = 0.002


def flatten(prefix: str, value: Any) -> dict[str, Any]:
    """Nested dictionaries as dotted keys, leaves unchanged."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        key: leaf for name, item in value.items() for key, leaf in flatten(f"{prefix}.{name}", item).items()
    }


def arm_facts(arm: ArmResult) -> dict[str, Any] | None:
    """The fairness facts of one arm, from the summary of its first seed; None where it was not trained."""
    summary = arm.first("summary")
    if summary is None:
        return None
    facts: dict[str, Any] = {}
    for key in (*BATCHING_KEYS, *OUTCOME_KEYS, *EQUAL_KEYS, *NOTED_KEYS):
        if summary.get(key) is not None:
            facts[key] = summary[key]
    for key in NESTED_KEYS:
        if isinstance(summary.get(key), dict):
            facts.update(flatten(key, summary[key]))
    audit = summary.get("samples_audit") or {}
    for key in ("expected", "distinct", "padding_duplicates", "missing", "lost", "doubled", "complete"):
        if key in audit:
            value = audit[key]
            facts[f"samples_audit.{key}"] = len(value) if isinstance(value, list) else value
    facts["samples_audit.ids_checksum"] = ids_checksum(audit)
    return facts


def ids_checksum(audit: dict[str, Any]) -> str | None:
    """Checksum of the ids of every epoch whatever their order: equal for arms that batch differently."""
    epochs = [epoch.get("set_sha256") for epoch in audit.get("epochs") or [] if isinstance(epoch, dict)]
    if epochs and all(epochs):
        return hashlib.sha256("".join(epochs).encode()).hexdigest()
    return audit.get("set_sha256")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _differs(key: str, one: Any, other: Any) -> bool:
    if key in SAME_WORK and isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) > WORK_TOLERANCE * max(abs(one), abs(other), 1)
    return _text(one) != _text(other)


def fairness(arms: list[ArmResult], reference: str) -> dict[str, Any]:
    """Facts per arm, warnings, and whether the training ids are proven equal.

    Returns:
        ``facts`` (arm -> key -> value), ``keys`` (all keys in order), ``warnings`` (sentences), ``notes``
        (differences that follow from batching), ``same_ids`` (True, False, or None without checksums).
    """
    facts = {arm.name: found for arm in arms if arm.name != UNTRAINED and (found := arm_facts(arm))}
    order = (*BATCHING_KEYS, *OUTCOME_KEYS, *EQUAL_KEYS, *NOTED_KEYS)
    known = dict.fromkeys(key for found in facts.values() for key in found)
    keys = [key for key in order if key in known] + [key for key in known if key not in order]
    warnings: list[str] = []
    notes: list[str] = []
    base = facts.get(reference)
    if base is None and facts:
        warnings.append(
            f"the reference arm {reference} has no training summary: nothing can be compared with it"
        )
    for name, found in facts.items():
        if base is None or name == reference:
            continue
        for key in keys:
            batching = key in BATCHING_KEYS or (key in OUTCOME_KEYS and key not in SAME_WORK)
            if batching or key in HARMLESS_KEYS or key.startswith("samples_audit."):
                continue
            one, other = found.get(key), base.get(key)
            if not _differs(key, one, other):
                continue
            if key in NOTED_KEYS:
                notes.append(f"{name} and {reference} were trained at different commits of this workflow")
            else:
                warnings.append(
                    f"{name} and {reference} differ in {key}, which is not batching: "
                    f"{_text(one)} and {_text(other)}"
                )
        steps, base_steps = found.get("optimizer_steps"), base.get("optimizer_steps")
        if steps and base_steps and steps != base_steps:
            rate = ", at the same peak learning rate" if found.get("lr") == base.get("lr") else ""
            notes.append(
                f"{name} made {steps:,} optimizer steps, {reference} {base_steps:,}{rate}: "
                "a difference in quality is one of batching and of the number of steps together"
            )
    checksums = {name: found.get("samples_audit.ids_checksum") for name, found in facts.items()}
    same_ids: bool | None
    if len(checksums) < 2 or not all(checksums.values()):
        same_ids = None
        lacking = [name for name, checksum in checksums.items() if not checksum]
        if lacking and len(checksums) > 1:
            warnings.append(
                "same training samples not proven: no checksum of the ids for " + ", ".join(lacking)
            )
    else:
        same_ids = len(set(checksums.values())) == 1
        if not same_ids:
            warnings.append(
                "the arms trained on different samples: their checksums of the emitted ids differ"
            )
    for name, found in facts.items():
        for key in ("missing", "lost", "doubled"):
            if found.get(f"samples_audit.{key}"):
                warnings.append(f"{name}: {found[f'samples_audit.{key}']} training samples {key}")
        if found.get("samples_audit.complete") is False:
            warnings.append(f"{name} did not emit every training sample once (stopped early or lost samples)")
    return {"facts": facts, "keys": keys, "warnings": warnings, "notes": notes, "same_ids": same_ids}
