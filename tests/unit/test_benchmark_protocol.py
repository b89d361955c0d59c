"""MMMU rows to prompts, against the hand-written expectations of the input cases 11 and 12."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from odb_workflow.evaluation.mmmu_data import load_benchmark
from odb_workflow.evaluation.mmmu_protocol import (
    IMAGES_FIRST,
    IMAGES_INLINE,
    Excluded,
    Question,
    RowError,
    build_question,
    parse_options,
)

OPTION_STRINGS, IMAGE_REFS = "11-mmmu-option-strings", "12-mmmu-image-refs"


def outcome(case: Path, sample_id: str, protocol: str) -> Question | Excluded | RowError:
    row = next(
        row for row in load_benchmark(str(case), "validation", None).rows if row.sample_id == sample_id
    )
    try:
        return build_question(
            row.columns, sample_id=row.sample_id, subject=row.subject, present=row.present, protocol=protocol
        )
    except RowError as error:
        return error


def ids_of(repository: Path, case: str) -> list[str]:
    return list(json.loads((repository / "tests/cases" / case / "expected.json").read_text()))


def test_option_strings_are_literals_and_nothing_else(cases: Path):
    case = cases / OPTION_STRINGS
    expected = json.loads((case / "expected.json").read_text())
    rows = load_benchmark(str(case), "validation", None).rows
    assert [row.sample_id for row in rows] == list(expected)
    for row in rows:
        want = expected[row.sample_id]
        if want["options"] is None:
            with pytest.raises(RowError, match=f"{row.sample_id}: options are not a literal list"):
                parse_options(row.columns["options"], row.sample_id)
        else:
            assert list(parse_options(row.columns["options"], row.sample_id)) == want["options"]


@pytest.mark.parametrize("protocol", [IMAGES_FIRST, IMAGES_INLINE])
def test_every_option_has_its_letter_and_gold_is_where_it_should_be(cases: Path, protocol: str):
    case = cases / OPTION_STRINGS
    expected = json.loads((case / "expected.json").read_text())
    for sample_id, want in expected.items():
        found = outcome(case, sample_id, protocol)
        if sample_id.endswith("nine-1"):
            assert (
                isinstance(found, Excluded)
                and found.reason == "non_letter_answer"
                and found.answer_raw == "I"
            )
        elif want["options"] is None:
            assert isinstance(found, RowError) and sample_id in str(found)
        else:
            assert found.answer == want["gold"]
            assert found.valid_letters.index(found.answer) == want["gold_index"]
            assert len(found.valid_letters) == len(want["options"])
            lines = found.text.split("\n")
            assert lines[-1] == "Answer with the option letter only."
            assert f"({want['gold']}) {want['options'][want['gold_index']]}" in found.text


def test_the_prompt_of_protocol_v1_word_for_word(cases: Path):
    question = outcome(cases / OPTION_STRINGS, "validation_Selfmade_letters-1", IMAGES_FIRST)
    assert question.messages() == [
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {
                    "type": "text",
                    "text": "Which label marks the disc in <image 1>?\n(A) B\n(B) A\n(C) D\n(D) C\n"
                    "Answer with the option letter only.",
                },
            ],
        }
    ]
    assert (question.valid_letters, question.option_status) == ("ABCD", "options_valid")


def test_v1_shows_every_image_once_in_column_order_and_leaves_the_text(cases: Path):
    case = cases / IMAGE_REFS
    present = {"optimg": (1, 2, 3), "order": (1, 2), "twice": (1, 2), "none1": (2,), "missing": (1,)}
    present |= {"unref": (1, 2), "noimg": (), "gold": (1,)}
    for name, images in present.items():
        question = outcome(case, f"validation_Selfmade_{name}-1", IMAGES_FIRST)
        assert isinstance(question, Question), name
        assert question.images == images, name
        assert [segment.image for segment in question.segments] == [*images, None], name
    order = outcome(case, "validation_Selfmade_order-1", IMAGES_FIRST)
    assert order.text.startswith("Is <image 2> the same shape as <image 1>?\n(A) yes")
    missing = outcome(case, "validation_Selfmade_missing-1", IMAGES_FIRST)
    assert missing.missing_images == (3,)
    gold = outcome(case, "validation_Selfmade_gold-1", IMAGES_FIRST)
    assert gold.option_status == "answer_outside_options_scored_all_letters"
    assert gold.valid_letters == "ABCDEFGH"
    open_row = outcome(case, "validation_Selfmade_open-1", IMAGES_FIRST)
    assert isinstance(open_row, Excluded) and open_row.reason == "non_letter_answer"


def test_inline_shows_images_where_they_are_named(cases: Path):
    case = cases / IMAGE_REFS
    for sample_id, want in json.loads((case / "expected.json").read_text()).items():
        found = outcome(case, sample_id, IMAGES_INLINE)
        if want["image_order"] == "error":
            assert isinstance(found, RowError) and found.sample_id == sample_id
        elif isinstance(want["image_order"], str):
            assert isinstance(found, Excluded)
        else:
            assert list(found.images) == want["image_order"], sample_id
    twice = outcome(case, "validation_Selfmade_twice-1", IMAGES_INLINE)
    assert [segment.image or segment.text for segment in twice.segments] == [
        "Compare with ",
        1,
        ".\n(A) ",
        1,
        "\n(B) ",
        2,
        "\nAnswer with the option letter only.",
    ]


def row(options: object, answer: object, question: object = "Q?") -> Question | Excluded:
    columns = {"question": question, "options": options, "answer": answer}
    return build_question(columns, sample_id="x", subject="Art", present=(), protocol=IMAGES_FIRST)


def test_odd_rows_are_scored_over_all_letters_with_their_status():
    assert row("[]", "B").option_status == "missing_options_scored_all_letters"
    assert row("[]", "B").text == "Q?\nAnswer with the option letter only."
    assert row(None, "B").valid_letters == "ABCDEFGH"
    nine = row(str([f"v{n}" for n in range(9)]), "H")
    assert (nine.option_status, nine.valid_letters) == ("too_many_options_scored_AH", "ABCDEFGH")
    assert "(I) v8" in nine.text
    assert row("['a', 'b']", "C").option_status == "answer_outside_options_scored_all_letters"
    assert row("['a', 'b', 'c']", " b ").answer == "B"


@pytest.mark.parametrize("answer", ["", None, "AB", "I", "7", "['A']", "answer A", "É"])
def test_answers_that_are_no_single_letter_are_excluded(answer: object):
    found = row("['a', 'b']", answer)
    assert isinstance(found, Excluded) and found.reason == "non_letter_answer"
    assert found.answer_raw == str(answer)


def test_an_empty_option_keeps_its_letter():
    question = row("['', 'yes', 'no']", "C")
    assert question.valid_letters == "ABC"
    assert "(A) \n(B) yes\n(C) no" in question.text


@pytest.mark.parametrize("options", ["a, b", "{'a': 1}", "'ab'", "[1, 2", "[x for x in 'ab']", "(" * 500])
def test_options_that_are_no_literal_list_are_refused(options: str):
    with pytest.raises(RowError, match="x: options are not a"):
        row(options, "A")
