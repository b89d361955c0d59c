"""Statistics of the comparison against hand-computed values and against simulated null data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from odb_workflow.comparison.claims import difference_sentence, p_text, speed_sentence
from odb_workflow.comparison.statistics import (
    Estimate,
    above_chance,
    exact_mcnemar,
    holm,
    mean_interval,
    paired_bootstrap,
    proportion,
    proportion_standard_error,
    ratio_of_means,
)


def test_mean_interval_by_hand() -> None:
    """Mean 3, standard error 0.70711, t(0.975, 4) = 2.77645: half width 1.96324."""
    estimate = mean_interval([1, 2, 3, 4, 5])
    assert estimate.value == 3
    assert estimate.low == pytest.approx(3 - 1.96324, abs=1e-5)
    assert estimate.high == pytest.approx(3 + 1.96324, abs=1e-5)


def test_one_value_has_no_interval() -> None:
    estimate = mean_interval([2.5])
    assert (estimate.value, estimate.low, estimate.high) == (2.5, None, None)
    assert not estimate.excludes(0)
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])


@pytest.mark.parametrize(
    ("only_reference", "only_candidate", "p_value"),
    [
        (2, 10, 2 * (1 + 12 + 66) / 2**12),
        (10, 2, 2 * (1 + 12 + 66) / 2**12),
        (0, 5, 2 / 2**5),
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_exact_mcnemar_by_hand(only_reference: int, only_candidate: int, p_value: float) -> None:
    reference = [True] * only_reference + [False] * only_candidate + [True] * 7 + [False] * 4
    candidate = [False] * only_reference + [True] * only_candidate + [True] * 7 + [False] * 4
    result = exact_mcnemar(reference, candidate)
    assert (result["only_reference"], result["only_candidate"]) == (only_reference, only_candidate)
    assert result["n"] == only_reference + only_candidate + 11
    assert result["p_value"] == pytest.approx(p_value)


def test_mcnemar_needs_pairs() -> None:
    with pytest.raises(ValueError, match="paired"):
        exact_mcnemar([True], [True, False])


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.03, 0.04 times 3, 2, 1 = 0.03, 0.06, 0.04; made monotone: 0.03, 0.06, 0.06."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_wilson_interval_and_standard_error() -> None:
    """Wilson's interval of 8 of 10 is [0.4902, 0.9433] in every textbook table."""
    estimate = proportion(8, 10)
    assert (estimate.low, estimate.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert proportion_standard_error(0.5, 100) == pytest.approx(0.05)
    # The published size: 850 rows near 45 % have about 1.7 points.
    assert 100 * proportion_standard_error(0.45, 850) == pytest.approx(1.7, abs=0.02)
    assert math.isnan(proportion(0, 0).value)


def test_above_chance_with_mixed_numbers_of_options() -> None:
    """Both right with chances 1/2 and 1/4: 1/8. One of two right: 1 - 1/2 * 3/4."""
    assert above_chance([True, True], [0.5, 0.25]) == pytest.approx(1 / 8)
    assert above_chance([True, False], [0.5, 0.25]) == pytest.approx(1 - 3 / 8)
    assert above_chance([], []) is None


def test_ratio_of_means_by_hand() -> None:
    """Relative standard errors 0.057735 each, 4 degrees of freedom, t = 2.77645: factor exp(0.226700)."""
    estimate = ratio_of_means([2.0, 2.2, 1.8], [1.0, 1.1, 0.9])
    assert estimate.value == pytest.approx(2.0)
    factor = math.exp(2.77645 * math.sqrt(2) * 0.1 / math.sqrt(3))
    assert estimate.low == pytest.approx(2 / factor, rel=1e-4)
    assert estimate.high == pytest.approx(2 * factor, rel=1e-4)
    with pytest.raises(ValueError, match="positive"):
        ratio_of_means([], [1.0])


def test_paired_bootstrap_plain_and_weighted() -> None:
    """The interval of a plain mean is near the normal one; the weighted estimate is a ratio of sums."""
    rng = np.random.default_rng(3)
    difference = rng.normal(0.2, 1.0, 600)
    estimate = paired_bootstrap(difference)
    assert estimate.value == pytest.approx(difference.mean())
    half = 1.96 * difference.std(ddof=1) / math.sqrt(600)
    assert estimate.low == pytest.approx(difference.mean() - half, abs=0.1 * half)
    assert estimate.high == pytest.approx(difference.mean() + half, abs=0.1 * half)
    weighted = paired_bootstrap([1.0, 2.0, 3.0], [10, 20, 30])
    assert weighted.value == pytest.approx(0.1)
    assert (weighted.low, weighted.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert paired_bootstrap(difference) == estimate, "the same data gives the same report"


def test_few_long_records_support_no_claim_per_token() -> None:
    """Forty records of which one holds nearly all tokens weigh like little more than one."""
    tokens = np.array([1.0] * 39 + [1000.0])
    estimate = paired_bootstrap(-0.5 * tokens + np.linspace(-0.1, 0.1, 40), tokens)
    assert estimate.effective_n == pytest.approx(1039**2 / (39 + 1000**2))
    assert difference_sentence(estimate, digits=2, better="lower").startswith(
        "too few examples (a few long ones of 40 hold most label tokens, as if there were 1) to claim"
    )
    even = paired_bootstrap(np.linspace(-0.6, -0.4, 40), np.ones(40))
    assert even.effective_n == pytest.approx(40)
    assert difference_sentence(even, digits=2, better="lower").startswith("lower, which is better")


def test_paired_bootstrap_edges() -> None:
    assert paired_bootstrap([0.0] * 50).as_dict()["high"] == 0.0
    assert paired_bootstrap([1.0]).low is None
    with pytest.raises(ValueError, match="at least one"):
        paired_bootstrap([])
    with pytest.raises(ValueError, match="positive sum"):
        paired_bootstrap([1.0, 2.0], [0, 0])


def false_alarms(draw, decide, runs: int = 400) -> float:
    """Share of simulated null data sets on which ``decide`` claims a difference."""
    rng = np.random.default_rng(11)
    return sum(decide(draw(rng)) for _ in range(runs)) / runs


def test_false_alarm_rate_of_validation_loss() -> None:
    """Skewed null differences, 95 %: about 5 % false alarms (standard error over 400 runs: 1.1 %)."""
    rate = false_alarms(
        lambda rng: rng.exponential(1.0, 150) - rng.exponential(1.0, 150),
        lambda data: paired_bootstrap(data, n_resamples=599).excludes(0),
    )
    assert 0.02 <= rate <= 0.085


def test_false_alarm_rate_of_token_weighted_loss() -> None:
    def decide(data) -> bool:
        return paired_bootstrap(data[0] * data[1], data[1], n_resamples=599).excludes(0)

    rate = false_alarms(lambda rng: (rng.normal(0, 1, 150), rng.integers(5, 60, 150).astype(float)), decide)
    assert 0.02 <= rate <= 0.085


def test_false_alarm_rate_of_mmmu() -> None:
    """The exact test never exceeds its level; two guessers differ by chance only."""
    rate = false_alarms(
        lambda rng: (rng.random(120) < 0.4, rng.random(120) < 0.4),
        lambda data: exact_mcnemar(*data)["p_value"] < 0.05,
        runs=1000,
    )
    assert rate <= 0.05 + 0.015


def test_false_alarm_rate_of_speed() -> None:
    rate = false_alarms(
        lambda rng: (rng.normal(100, 8, 10), rng.normal(100, 20, 10)),
        lambda data: ratio_of_means(*data).excludes(1),
        runs=1000,
    )
    assert 0.03 <= rate <= 0.07


def test_a_real_difference_is_found() -> None:
    rng = np.random.default_rng(5)
    assert paired_bootstrap(rng.normal(0.3, 1, 400)).excludes(0)
    assert ratio_of_means(rng.normal(300, 10, 10), rng.normal(100, 5, 10)).excludes(1)


@pytest.mark.parametrize(
    ("estimate", "options", "text"),
    [
        (
            Estimate(-0.02, -0.05, 0.01, 300, 0.95, "bootstrap"),
            {},
            "no difference shown: -0.02 [-0.05, 0.01]",
        ),
        (
            Estimate(-0.2, -0.3, -0.1, 300, 0.95, "bootstrap"),
            {},
            "lower, which is better: -0.20 [-0.30, -0.10]",
        ),
        (Estimate(0.2, 0.1, 0.3, 300, 0.95, "bootstrap"), {}, "higher, which is worse: 0.20 [0.10, 0.30]"),
        (
            Estimate(0.2, 0.1, 0.3, 300, 0.95, "bootstrap"),
            {"confirmed": False},
            "no difference shown: 0.20 [0.10, 0.30]",
        ),
        (
            Estimate(0.2, 0.1, 0.3, 12, 0.95, "bootstrap"),
            {},
            "too few examples (12) to claim anything: 0.20 [0.10, 0.30]",
        ),
        (
            Estimate(0.2, None, None, 1, 0.95, "single value"),
            {},
            "no interval, so nothing is claimed: 0.20 [no interval]",
        ),
        (
            Estimate(3e-6, 1e-6, 5e-6, 300, 0.95, "bootstrap"),
            {},
            "equal to the digits shown: 0.00 [0.00, 0.00]",
        ),
        (
            Estimate(3e-6, None, None, 1, 0.95, "single value"),
            {},
            "no interval, so nothing is claimed: 0.00 [no interval]",
        ),
        (Estimate(-0.001, -0.002, 0.2, 99, 0.95, "bootstrap"), {}, "no difference shown: 0.00 [0.00, 0.20]"),
    ],
)
def test_sentences_claim_no_more_than_the_interval(estimate: Estimate, options: dict, text: str) -> None:
    assert difference_sentence(estimate, digits=2, better="lower", **options) == text


def test_speed_sentences() -> None:
    assert speed_sentence(None, None) == "speed not comparable: a throughput is missing"
    assert "no more is claimed" in speed_sentence(3.0, None)
    unsure = speed_sentence(1.1, Estimate(1.1, 0.9, 1.3, 10, 0.95, "x"))
    assert unsure.endswith("no difference in speed shown in steady state: 1.10 times [0.90, 1.30]")
    faster = speed_sentence(2.0, Estimate(2.2, 2.0, 2.4, 3, 0.95, "x"), per_seed=True)
    assert (
        faster
        == "2.00 times the samples/s over the whole training; over seeds faster: 2.20 times [2.00, 2.40]"
    )


def test_p_values_are_never_zero() -> None:
    assert (p_text(1e-9), p_text(0.0312), p_text(1.0)) == ("< 0.0001", "0.031", "1")
