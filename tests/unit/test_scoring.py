"""Letters, ties, tables and the audit, by hand."""

from __future__ import annotations

import math

import pytest
from odb_workflow.evaluation.letters import check_prompt_ends, letter_token_ids
from odb_workflow.evaluation.mmmu_protocol import IMAGES_FIRST, Excluded, build_question
from odb_workflow.evaluation.scoring import (
    accuracy_row,
    audit,
    choose_letter,
    excluded_record,
    needs_rescoring,
    p_value_above_chance,
    prediction_record,
    summarize,
)
from odb_workflow.runtime.errors import UserError

SCORES = [-3.0, -1.0, -1.0, -2.0, -0.5, -9.0, -9.0, -9.0]


def test_the_best_valid_letter_wins_and_ties_go_to_the_earlier():
    assert choose_letter(SCORES, "ABCD") == ("B", 0.0)
    assert choose_letter(SCORES, "ABCDEFGH") == ("E", 0.5)
    assert choose_letter(SCORES, "AD") == ("D", 1.0)
    assert choose_letter(SCORES, "A") == ("A", None)


def test_close_calls_are_those_within_the_margin():
    assert needs_rescoring(SCORES, "ABCD", 0.05)
    assert needs_rescoring([-1.0, -1.04] + [-9.0] * 6, "AB", 0.05)
    assert not needs_rescoring([-1.0, -1.06] + [-9.0] * 6, "AB", 0.05)
    # A close pair of letters that do not compete is none.
    assert not needs_rescoring(SCORES, "AB", 0.05)
    assert not needs_rescoring(SCORES, "A", 0.05)


def records() -> tuple[list[dict], list[dict]]:
    rows = [
        ("a1", "Art", "['x', 'y', 'z', 'w']", "B", SCORES),  # B, right by the tie rule
        ("a2", "Art", "['x', 'y', 'z', 'w']", "C", SCORES),  # B, wrong
        ("m1", "Math", "['x', 'y']", "A", SCORES),  # B, wrong
        ("m2", "Math", "[]", "E", SCORES),  # E over all letters, right
    ]
    predictions = []
    for sample_id, subject, options, answer, scores in rows:
        columns = {"question": "Q?", "options": options, "answer": answer}
        question = build_question(
            columns, sample_id=sample_id, subject=subject, present=(1,), protocol=IMAGES_FIRST
        )
        predictions.append(
            prediction_record(
                question, scores, protocol=IMAGES_FIRST, split="validation", rescored=sample_id == "a1"
            )
        )
    left_out = Excluded("m3", "Math", "non_letter_answer", "7")
    return predictions, [excluded_record(left_out, protocol=IMAGES_FIRST, split="validation")]


def test_tables_by_hand():
    predictions, excluded = records()
    results = summarize(predictions, excluded, ["Art", "Math", "Music"])
    assert [row["prediction"] for row in predictions] == ["B", "B", "B", "E"]
    assert (results["overall_accuracy"], results["overall_correct"], results["overall_total"]) == (50.0, 2, 4)
    assert results["accuracy"] == 0.5
    assert results["standard_error"] == pytest.approx(0.25)
    assert results["overall_standard_error"] == 25.0
    assert results["chance_accuracy"] == pytest.approx(100 * (1 / 4 + 1 / 4 + 1 / 2 + 1 / 8) / 4)
    assert results["per_category"]["Art & Design"]["accuracy"] == 50.0
    assert list(results["per_category"]) == ["Art & Design", "Science"]
    assert results["per_subject"]["Math"] == {
        "accuracy": 50.0,
        "correct": 1,
        "total": 2,
        "standard_error": round(100 * math.sqrt(0.25 / 2), 4),
        "chance": 31.25,
        "excluded": 1,
    }
    assert results["per_subject"]["Music"]["total"] == 0
    assert results["total_rows_seen"] == 5
    assert results["excluded_by_reason"] == {"non_letter_answer": 1}
    assert results["option_status_counts"] == {"missing_options_scored_all_letters": 1, "options_valid": 3}
    assert (results["ties"], results["rescored_alone"], results["total_images"]) == (2, 1, 4)


def test_p_value_is_the_exact_tail():
    predictions, _ = records()
    # P(at least 2 of 4 right) with chances 1/4, 1/4, 1/2, 1/8, by enumeration
    chances = [1 / 4, 1 / 4, 1 / 2, 1 / 8]
    tail = 0.0
    for outcome in range(16):
        hits = [outcome >> place & 1 for place in range(4)]
        if sum(hits) >= 2:
            tail += math.prod(p if hit else 1 - p for p, hit in zip(chances, hits, strict=True))
    assert p_value_above_chance(predictions) == pytest.approx(tail)
    assert p_value_above_chance([]) is None


def test_accuracy_of_nothing_has_no_error():
    assert accuracy_row([]) == {
        "accuracy": 0.0,
        "correct": 0,
        "total": 0,
        "standard_error": None,
        "chance": None,
    }


def test_the_audit_notices_a_changed_line():
    predictions, excluded = records()
    results = summarize(predictions, excluded, ["Art", "Math"])
    tokens = list("ABCDEFGH")
    assert audit(predictions, results, range(8), tokens)["consistent"]
    predictions[1]["prediction"] = "C"
    checked = audit(predictions, results, range(8), tokens)
    assert not checked["consistent"]
    assert not checked["checks"]["letters_recomputed_from_scores_agree"]
    assert checked["candidate_token_info"]["C"]["token_ids"] == [2]


class Characters:
    """A tokenizer with one token per character, and multi-character merges where asked."""

    unk_token_id = 0

    def __init__(self, merges: tuple[str, ...] = (), unknown: str = "") -> None:
        self.merges, self.unknown = merges, unknown

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        ids = []
        while text:
            merge = next((merge for merge in self.merges if text.startswith(merge)), text[0])
            ids.append(0 if merge in self.unknown else sum(ord(c) << (8 * n) for n, c in enumerate(merge)))
            text = text[len(merge) :]
        return {"input_ids": ids}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [str(number) for number in ids]


def test_letters_are_the_tokens_that_follow_the_prompt():
    assert letter_token_ids(Characters(), "prompt\n") == [ord(letter) for letter in "ABCDEFGH"]


def test_a_letter_that_melts_into_the_prompt_stops_the_run():
    with pytest.raises(UserError, match="the letter C is not one token after the prompt"):
        letter_token_ids(Characters(merges=("\nC",)), "prompt\n")


def test_letters_that_share_a_token_stop_the_run():
    with pytest.raises(UserError, match="eight distinct known tokens"):
        letter_token_ids(Characters(unknown="GH"), "prompt\n")


def test_prompts_must_end_alike():
    end = "Answer with the option letter only.<end>assistant\n"
    assert check_prompt_ends([("a", "x" + end), ("b", "yy" + end)]) == end
    with pytest.raises(UserError, match="sample b"):
        check_prompt_ends([("a", "x" + end), ("b", "x" + end + "!")])
    with pytest.raises(UserError, match="sample a"):
        check_prompt_ends([("a", "no instruction")])
