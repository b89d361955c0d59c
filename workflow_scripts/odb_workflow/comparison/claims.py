"""Sentences of the report. None claims more than its interval allows."""

from __future__ import annotations

from .statistics import MIN_PAIRS, Estimate


def interval_text(low: float | None, high: float | None, digits: int) -> str:
    """``[low, high]``, or a plain word where there is no interval."""
    if low is None or high is None:
        return "[no interval]"
    return f"[{_number(low, digits)}, {_number(high, digits)}]"


def p_text(p_value: float) -> str:
    """A p-value with two significant digits, never as zero."""
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.2g}"


def _number(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("-") and float(text) == 0 else text


def difference_sentence(
    estimate: Estimate,
    *,
    digits: int,
    better: str,
    unit: str = "",
    scale: float = 1.0,
    confirmed: bool = True,
) -> str:
    """One sentence on a difference, candidate minus reference.

    Args:
        estimate: Difference with its interval.
        digits: Digits shown.
        better: ``higher`` or ``lower``: the direction that is better.
        unit: Unit after the number.
        scale: Factor applied for display (100 for points of percent).
        confirmed: False where a second test (McNemar) does not support the difference; then none is claimed.
    """
    value = estimate.value * scale
    low = None if estimate.low is None else estimate.low * scale
    high = None if estimate.high is None else estimate.high * scale
    shown = [value, *(end for end in (low, high) if end is not None)]
    tail = f"{_number(value, digits)}{' ' + unit if unit else ''} {interval_text(low, high, digits)}"
    if estimate.low is None or estimate.high is None:
        return f"no interval, so nothing is claimed: {tail}"
    if all(float(_number(part, digits)) == 0 for part in shown):
        # The same steps in another layout differ by rounding alone, and always in one direction.
        return f"equal to the digits shown: {tail}"
    if "bootstrap" in estimate.method and estimate.n < MIN_PAIRS:
        return f"too few examples ({estimate.n}) to claim anything: {tail}"
    if estimate.effective_n is not None and estimate.effective_n < MIN_PAIRS:
        few = f"as if there were {estimate.effective_n:.0f}"
        told = f"a few long ones of {estimate.n} hold most label tokens, {few}"
        return f"too few examples ({told}) to claim anything: {tail}"
    if not estimate.excludes(0.0) or not confirmed:
        return f"no difference shown: {tail}"
    direction = "higher" if estimate.value > 0 else "lower"
    verdict = "better" if direction == better else "worse"
    return f"{direction}, which is {verdict}: {tail}"


def speed_sentence(
    whole: float | None, interval: Estimate | None, unit: str = "samples/s", per_seed: bool = False
) -> str:
    """One sentence on a throughput ratio.

    Args:
        whole: Ratio over the whole training.
        interval: Steady-state ratio over windows, or with ``per_seed`` the whole-training ratio over seeds.
        unit: What the ratio is of.
        per_seed: Where the interval comes from.
    """
    if whole is None:
        return "speed not comparable: a throughput is missing"
    head = f"{whole:.2f} times the {unit} over the whole training"
    if interval is None or interval.low is None or interval.high is None:
        return f"{head}; no interval (too few steps or seeds), so no more is claimed"
    tail = f"{interval.value:.2f} times {interval_text(interval.low, interval.high, 2)}"
    where = "over seeds" if per_seed else "in steady state"
    if not interval.excludes(1.0):
        return f"{head}; no difference in speed shown {where}: {tail}"
    return f"{head}; {where} {'faster' if interval.value > 1 else 'slower'}: {tail}"
