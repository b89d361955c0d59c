"""From letter log-probabilities to predictions, tables, standard errors and the audit. Nothing here is
random.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .mmmu_protocol import LETTERS, Excluded, Question
from .mmmu_subjects import category_order

#: Rows whose two best letters lie closer than this (nat) are scored again alone, so that the letter does not
#: depend on which rows shared the batch. Float32 sums differ in the sixth digit between batch shapes, bf16 in
#: the second.
MARGINS = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}


def choose_letter(scores: Sequence[float], letters: str) -> tuple[str, float | None]:
    """The best of ``letters`` by log-probability; ties go to the earlier letter.

    Args:
        scores: Log-probabilities of A-H, nat.
        letters: The letters that compete, in alphabetical order.

    Returns:
        The letter, and the distance to the second best in nat (None with one letter). 0.0 is a tie.
    """
    ranked = sorted(letters, key=lambda letter: (-scores[LETTERS.index(letter)], letter))
    best = scores[LETTERS.index(ranked[0])]
    margin = best - scores[LETTERS.index(ranked[1])] if len(ranked) > 1 else None
    return ranked[0], margin


def needs_rescoring(scores: Sequence[float], letters: str, margin: float) -> bool:
    """Whether the two best letters lie within ``margin`` nat of each other."""
    distance = choose_letter(scores, letters)[1]
    return distance is not None and distance < margin


def prediction_record(
    question: Question, scores: Sequence[float], *, protocol: str, split: str, rescored: bool
) -> dict[str, Any]:
    """One line of ``predictions.jsonl``: the published fields, then ours (tie, rescored, images)."""
    letter, margin = choose_letter(scores, question.valid_letters)
    by_letter = {name: float(score) for name, score in zip(LETTERS, scores, strict=True)}
    return {
        "protocol": protocol,
        "split": split,
        "subject": question.subject,
        "category": question.category,
        "sample_id": question.sample_id,
        "id": question.sample_id,
        "question": question.question,
        "options": list(question.options),
        "valid_candidate_letters": list(question.valid_letters),
        "option_status": question.option_status,
        "ground_truth": question.answer,
        "candidate_scores": by_letter,
        "choice_scores": {name: by_letter[name] for name in question.valid_letters},
        "prediction": letter,
        "score_margin": margin,
        "correct": letter == question.answer,
        "num_images": len(question.images),
        "image_columns": [f"image_{number}" for number in question.images],
        "named_images_missing": [f"image_{number}" for number in question.missing_images],
        "tie": margin == 0.0,
        "rescored_alone": rescored,
    }


def excluded_record(row: Excluded, *, protocol: str, split: str) -> dict[str, Any]:
    """One line of ``excluded.jsonl``."""
    return {
        "protocol": protocol,
        "split": split,
        "subject": row.subject,
        "sample_id": row.sample_id,
        "id": row.sample_id,
        "reason": row.reason,
        "answer_raw": row.answer_raw,
        "detail": row.detail,
    }


def accuracy_row(predictions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy in percent with its binomial standard error in percentage points, and the chance level.

    The standard error is sqrt(p (1 - p) / n); it is None without rows. Chance is the mean of 1 / competing
    letters.
    """
    rows = list(predictions)
    total = len(rows)
    correct = sum(bool(row["correct"]) for row in rows)
    share = correct / total if total else 0.0
    chance = math.fsum(1 / len(row["valid_candidate_letters"]) for row in rows) / total if total else None
    return {
        "accuracy": round(100 * share, 2),
        "correct": correct,
        "total": total,
        "standard_error": round(100 * math.sqrt(share * (1 - share) / total), 4) if total else None,
        "chance": round(100 * chance, 4) if chance is not None else None,
    }


def summarize(
    predictions: Sequence[Mapping[str, Any]], excluded: Sequence[Mapping[str, Any]], subjects: Sequence[str]
) -> dict[str, Any]:
    """The tables of ``mmmu_mc_likelihood_results.json``: overall, per category, per subject, and all counts.

    ``overall_*`` and the tables are in percent, as published; ``accuracy`` and ``standard_error`` are the
    same numbers as fractions, not rounded.
    """
    overall = accuracy_row(predictions)
    share = overall["correct"] / overall["total"] if predictions else None
    categories = sorted(
        {row["category"] for row in predictions}, key=lambda name: (category_order(name), name)
    )
    return {
        "evaluated_samples": len(predictions),
        "excluded_samples": len(excluded),
        "total_rows_seen": len(predictions) + len(excluded),
        "overall_accuracy": overall["accuracy"],
        "overall_correct": overall["correct"],
        "overall_total": overall["total"],
        "overall_standard_error": overall["standard_error"],
        "accuracy": share,
        "standard_error": math.sqrt(share * (1 - share) / len(predictions)) if predictions else None,
        "num_scored": len(predictions),
        "chance_accuracy": overall["chance"],
        "p_value_above_chance": p_value_above_chance(predictions),
        "per_category": {
            name: accuracy_row(row for row in predictions if row["category"] == name) for name in categories
        },
        "per_subject": {
            name: accuracy_row(row for row in predictions if row["subject"] == name)
            | {"excluded": sum(row["subject"] == name for row in excluded)}
            for name in subjects
        },
        "excluded_by_reason": counts(row["reason"] for row in excluded),
        "prediction_counts": counts(row["prediction"] for row in predictions),
        "answer_counts": counts(row["ground_truth"] for row in predictions),
        "option_status_counts": counts(row["option_status"] for row in predictions),
        "ties": sum(row["tie"] for row in predictions),
        "rescored_alone": sum(row["rescored_alone"] for row in predictions),
        "rows_naming_missing_images": sum(bool(row["named_images_missing"]) for row in predictions),
        "total_images": sum(row["num_images"] for row in predictions),
    }


def p_value_above_chance(predictions: Sequence[Mapping[str, Any]]) -> float | None:
    """One-sided p-value of the number of right answers if each letter were equally likely.

    The rows have different numbers of letters, so the null distribution is Poisson-binomial; it is built
    exactly by convolution.
    """
    if not predictions:
        return None
    distribution = [1.0]
    for row in predictions:
        chance = 1 / len(row["valid_candidate_letters"])
        right = [0.0] + [probability * chance for probability in distribution]
        wrong = [probability * (1 - chance) for probability in distribution] + [0.0]
        distribution = [a + b for a, b in zip(right, wrong, strict=True)]
    correct = sum(bool(row["correct"]) for row in predictions)
    return min(1.0, math.fsum(distribution[correct:]))


def counts(values: Iterable[str]) -> dict[str, int]:
    """How often each value comes, in alphabetical order."""
    return dict(sorted(Counter(values).items()))


def audit(
    predictions: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    token_ids: Sequence[int],
    tokens: Sequence[str],
) -> dict[str, Any]:
    """Count everything again from the prediction lines alone and compare with the tables.

    Returns:
        The letter tokens, and ``checks``: one truth value per check; ``consistent`` when all hold.
    """
    again = [
        choose_letter(
            [row["candidate_scores"][name] for name in LETTERS], "".join(row["valid_candidate_letters"])
        )[0]
        for row in predictions
    ]
    correct = sum(letter == row["ground_truth"] for letter, row in zip(again, predictions, strict=True))
    ids = [row["sample_id"] for row in predictions]
    checks = {
        "letters_recomputed_from_scores_agree": again == [row["prediction"] for row in predictions],
        "correct_recount_agrees": correct == results["overall_correct"],
        "category_totals_add_up": sum(row["total"] for row in results["per_category"].values()) == len(ids),
        "subject_totals_add_up": sum(row["total"] for row in results["per_subject"].values()) == len(ids),
        "sample_ids_distinct": len(set(ids)) == len(ids),
        "scores_finite": all(
            math.isfinite(score) for row in predictions for score in row["candidate_scores"].values()
        ),
        "predictions_within_valid_letters": all(
            row["prediction"] in row["valid_candidate_letters"] for row in predictions
        ),
    }
    return {
        "candidate_token_info": {
            letter: {
                "candidate_text": letter,
                "token": token,
                "first_token_id": token_id,
                "token_ids": [token_id],
            }
            for letter, token, token_id in zip(LETTERS, tokens, token_ids, strict=True)
        },
        "checks": checks,
        "consistent": all(checks.values()),
    }
