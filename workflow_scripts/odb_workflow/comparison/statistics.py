"""Intervals and tests of the comparison. SciPy does the arithmetic.

All intervals are two-sided at ``LEVEL`` unless told otherwise. A paired interval speaks about the evaluation
examples: it says whether these two checkpoints differ, not whether another training seed would give the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95
MIN_PAIRS = 20
"""Fewer (effective) pairs than this support no claim: the percentile bootstrap is too narrow there."""

BOOTSTRAP_SEED = 20_240_607
_BOOTSTRAP_DRAWS = 10_000_000
_BATCH_DRAWS = 2_000_000


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
        value: Point estimate.
        low, high: Ends of the interval; None where it cannot be computed.
        n: Number of observations behind it (pairs, windows or seeds).
        level: Coverage of the interval.
        method: How the interval was made.
        effective_n: For weighted means ``(sum w)^2 / sum w^2``: how many equally weighted observations
            would tell as much. None where it is ``n``.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    level: float
    method: str
    effective_n: float | None = None

    def excludes(self, null: float) -> bool:
        """True when the interval exists and ``null`` lies outside it."""
        return self.low is not None and self.high is not None and not (self.low <= null <= self.high)

    def as_dict(self) -> dict[str, Any]:
        """Fields as a plain dictionary."""
        return asdict(self)


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Estimate:
    """Mean with Student's t interval; one value has no interval.

    Args:
        values: ``[n]`` independent observations (seeds, or batch means of windows).
        level: Coverage.

    Raises:
        ValueError: no value is given.
    """
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        raise ValueError("mean_interval needs at least one value")
    mean = float(data.mean())
    if data.size < 2:
        return Estimate(mean, None, None, int(data.size), level, "single value")
    half = float(stats.sem(data) * stats.t.ppf((1 + level) / 2, data.size - 1))
    return Estimate(mean, mean - half, mean + half, int(data.size), level, "Student t")


def paired_bootstrap(
    difference: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    level: float = LEVEL,
    seed: int = BOOTSTRAP_SEED,
    n_resamples: int | None = None,
) -> Estimate:
    """Mean paired difference with a percentile bootstrap interval over the pairs.

    Args:
        difference: ``[n]`` candidate minus reference, one per evaluation example. With ``weights`` these are
            differences of *sums* (per-sample loss sums); the estimate is ``sum(difference) / sum(weights)``.
        weights: ``[n]`` label tokens per example for the token-weighted mean; None for the plain mean.
        level: Coverage.
        seed: Seed of the resampling, fixed so that the same results give the same report.
        n_resamples: Resamples; by default 9,999, fewer for large ``n`` (never under 999).

    Raises:
        ValueError: no pair is given, or a weight sum of zero.
    """
    delta = np.asarray(difference, dtype=float)
    if delta.size == 0:
        raise ValueError("paired_bootstrap needs at least one pair")
    if weights is None:
        data: tuple[NDArray[Any], ...] = (delta,)

        def statistic(d: NDArray[Any], axis: int = -1) -> Any:
            return d.mean(axis=axis)
    else:
        tokens = np.asarray(weights, dtype=float)
        if tokens.shape != delta.shape or tokens.sum() <= 0:
            raise ValueError("weights must match the differences and have a positive sum")
        data = (delta, tokens)

        def statistic(d: NDArray[Any], t: NDArray[Any], axis: int = -1) -> Any:  # type: ignore[misc]
            return d.sum(axis=axis) / t.sum(axis=axis)

    value = float(statistic(*data))
    if delta.size < 2:
        return Estimate(value, None, None, int(delta.size), level, "single pair")
    if np.ptp(delta) == 0 and weights is None:
        return Estimate(value, value, value, int(delta.size), level, "all differences equal")
    resamples = n_resamples or int(np.clip(_BOOTSTRAP_DRAWS // delta.size, 999, 9_999))
    result = stats.bootstrap(
        data,
        statistic,
        n_resamples=resamples,
        batch=max(1, _BATCH_DRAWS // delta.size),
        vectorized=True,
        paired=True,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Estimate(
        value,
        float(interval.low),
        float(interval.high),
        int(delta.size),
        level,
        f"paired percentile bootstrap, {resamples} resamples",
        None if weights is None else float(data[1].sum() ** 2 / np.square(data[1]).sum()),
    )


def exact_mcnemar(reference_correct: ArrayLike, candidate_correct: ArrayLike) -> dict[str, Any]:
    """Exact two-sided McNemar test on paired right/wrong answers.

    Args:
        reference_correct: ``[n]`` booleans of the reference arm.
        candidate_correct: ``[n]`` booleans of the other arm, same rows in the same order.

    Returns:
        ``only_reference`` and ``only_candidate`` (discordant counts), ``n`` and ``p_value``
        (binomial test with probability one half on the discordant rows; 1.0 where there are none).

    Raises:
        ValueError: the two differ in length.
    """
    reference = np.asarray(reference_correct, dtype=bool)
    candidate = np.asarray(candidate_correct, dtype=bool)
    if reference.shape != candidate.shape:
        raise ValueError("McNemar's test needs paired rows")
    only_reference = int(np.sum(reference & ~candidate))
    only_candidate = int(np.sum(candidate & ~reference))
    discordant = only_reference + only_candidate
    p_value = float(stats.binomtest(only_candidate, discordant, 0.5).pvalue) if discordant else 1.0
    return {
        "only_reference": only_reference,
        "only_candidate": only_candidate,
        "n": int(reference.size),
        "p_value": p_value,
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    order = np.argsort(p_values)
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[int(index)] = running
    return adjusted


def proportion(successes: int, n: int, level: float = LEVEL) -> Estimate:
    """Share with Wilson's score interval; ``n`` of 0 gives a NaN value without an interval."""
    if n == 0:
        return Estimate(math.nan, None, None, 0, level, "no rows")
    interval = stats.binomtest(successes, n).proportion_ci(confidence_level=level, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high), n, level, "Wilson")


def proportion_standard_error(share: float, n: int) -> float:
    """Binomial standard error of a share, ``sqrt(p (1 - p) / n)``; NaN for ``n`` of 0."""
    return math.sqrt(share * (1 - share) / n) if n else math.nan


def above_chance(correct: ArrayLike, chance: ArrayLike) -> float | None:
    """One-sided exact p-value that more rows are right than guessing gives (Poisson binomial law).

    Args:
        correct: ``[n]`` booleans.
        chance: ``[n]`` probability of a right guess, ``1 / options`` of each row.

    Returns:
        The p-value; None without rows.
    """
    right, guess = np.asarray(correct, dtype=bool), np.asarray(chance, dtype=float)
    if right.size == 0:
        return None
    return float(np.clip(stats.poisson_binom.sf(int(right.sum()) - 1, guess), 0.0, 1.0))


def ratio_of_means(numerator: ArrayLike, denominator: ArrayLike, level: float = LEVEL) -> Estimate:
    """Ratio of two independent means, interval on the log scale (delta method, Welch's degrees of freedom).

    Args:
        numerator: ``[n]`` window throughputs of one arm (positive).
        denominator: ``[m]`` window throughputs of the reference (positive).
        level: Coverage.

    Raises:
        ValueError: a side is empty or its mean is not positive.
    """
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    if top.size == 0 or bottom.size == 0 or top.mean() <= 0 or bottom.mean() <= 0:
        raise ValueError("ratio_of_means needs positive values on both sides")
    ratio = float(top.mean() / bottom.mean())
    n = int(min(top.size, bottom.size))
    if n < 2:
        return Estimate(ratio, None, None, n, level, "single window")
    parts = [(float(stats.sem(side)) / float(side.mean())) ** 2 for side in (top, bottom)]
    variance = sum(parts)
    if variance == 0:
        return Estimate(ratio, ratio, ratio, n, level, "no spread")
    freedom = variance**2 / sum(
        part**2 / (side.size - 1) for part, side in zip(parts, (top, bottom), strict=True)
    )
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(variance)
    return Estimate(
        ratio, ratio * math.exp(-half), ratio * math.exp(half), n, level, "log ratio of window means, Welch"
    )
