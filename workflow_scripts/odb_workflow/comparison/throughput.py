"""Throughput from the step log: warm-up and steady state apart, and the spread over windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from .statistics import Estimate, mean_interval, ratio_of_means

WARMUP_SHARE = 0.1
MIN_WARMUP_STEPS = 3
WINDOWS = 10
MIN_WINDOWS = 4
MIN_WINDOW_STEPS = 2


def step_seconds(steps: pd.DataFrame) -> np.ndarray:
    """Wall-clock seconds of each step, ``[n_steps]``: differences of the elapsed time."""
    return np.diff(steps["elapsed_seconds"].to_numpy(dtype=float), prepend=0.0)


def warmup_steps(steps: pd.DataFrame) -> int:
    """Number of steps counted as warm-up: those before a tenth of the samples, at least three."""
    samples = steps["samples"].to_numpy(dtype=float)
    reached = int(np.searchsorted(np.cumsum(samples), WARMUP_SHARE * samples.sum()) + 1)
    return min(len(steps), max(MIN_WARMUP_STEPS, reached))


def window_rates(steps: pd.DataFrame) -> dict[str, Any] | None:
    """Samples/s and real tokens/s of the warm-up, of the steady state, and of its consecutive windows.

    Args:
        steps: Step log with ``samples``, ``real_tokens``, ``elapsed_seconds``.

    Returns:
        None when the log lacks these columns or has no steady state; else ``warmup`` and ``steady``
        (``steps``, ``seconds``, ``samples_per_second``, ``real_tokens_per_second``) and ``windows``
        (lists of both rates; empty where the run is too short for windows).
    """
    if not {"samples", "real_tokens", "elapsed_seconds"} <= set(steps.columns) or len(steps) < 2:
        return None
    seconds = step_seconds(steps)
    samples = steps["samples"].to_numpy(dtype=float)
    tokens = steps["real_tokens"].to_numpy(dtype=float)
    start = warmup_steps(steps)

    def rate(part: slice | np.ndarray) -> dict[str, Any]:
        duration = float(seconds[part].sum())
        positive = duration > 0
        return {
            "steps": len(seconds[part]),
            "seconds": duration,
            "samples_per_second": float(samples[part].sum()) / duration if positive else None,
            "real_tokens_per_second": float(tokens[part].sum()) / duration if positive else None,
        }

    steady_steps = len(steps) - start
    if steady_steps < 1:
        return {"warmup": rate(slice(0, start)), "steady": None, "windows": None}
    count = min(WINDOWS, steady_steps // MIN_WINDOW_STEPS)
    windows: dict[str, list[float]] = {"samples_per_second": [], "real_tokens_per_second": []}
    if count >= MIN_WINDOWS:
        # Windows of about equal time, so that the mean of their rates is near the rate of the whole.
        ends = np.cumsum(seconds[start:])
        number = np.minimum((ends - seconds[start:] / 2) / max(ends[-1], 1e-9) * count, count - 1).astype(int)
        for window in np.unique(number):
            one = rate(start + np.flatnonzero(number == window))
            for key, rates in windows.items():
                if one[key] is not None:
                    rates.append(one[key])
        if len(windows["samples_per_second"]) < MIN_WINDOWS:
            windows = {key: [] for key in windows}
    return {"warmup": rate(slice(0, start)), "steady": rate(slice(start, None)), "windows": windows}


def steady_estimate(rates: dict[str, Any] | None, key: str) -> Estimate | None:
    """Steady-state rate with the t interval over windows; None without windows."""
    values = ((rates or {}).get("windows") or {}).get(key) or []
    if not rates or not values:
        return None
    estimate, value = mean_interval(values), rates["steady"][key]
    shift = value - estimate.value  # the width comes from the windows, the value from all steady steps
    assert estimate.low is not None and estimate.high is not None
    return replace(estimate, value=value, low=estimate.low + shift, high=estimate.high + shift)


def steady_ratio(arm: dict[str, Any] | None, reference: dict[str, Any] | None, key: str) -> Estimate | None:
    """Ratio of the steady-state rates of two arms with an interval over windows; None without windows."""
    top = ((arm or {}).get("windows") or {}).get(key) or []
    bottom = ((reference or {}).get("windows") or {}).get(key) or []
    if not arm or not reference or not top or not bottom or min(*top, *bottom) <= 0:
        return None
    estimate, value = ratio_of_means(top, bottom), arm["steady"][key] / reference["steady"][key]
    factor = value / estimate.value
    assert estimate.low is not None and estimate.high is not None
    return replace(estimate, value=value, low=estimate.low * factor, high=estimate.high * factor)


def time_shares(summary: dict[str, Any], steps: pd.DataFrame | None) -> dict[str, float] | None:
    """Where the training time goes, in seconds: ``compute``, ``data_wait``, ``other``.

    ``compute`` is the time inside steps that was not spent on waiting for a batch; ``other`` is what remains
    of the runtime (logging, checkpoints, evaluation of stop conditions).
    """
    runtime, wait = summary.get("runtime_seconds"), summary.get("data_wait_seconds")
    if not runtime or wait is None:
        return None
    compute = None
    if steps is not None and "step_ms" in steps:
        compute = max(0.0, float(steps["step_ms"].sum()) / 1000 - wait)
    if compute is None:
        compute = max(0.0, runtime - wait)
    compute = min(compute, max(0.0, runtime - wait))
    return {
        "compute": compute,
        "data_wait": float(wait),
        "other": max(0.0, float(runtime) - compute - float(wait)),
    }
