"""From the lines of one or more calls to a table, the checks, and the record for ``results/examples``."""

from __future__ import annotations

from typing import Any

# Loss and gradient norm. bf16 rounds to 2^-9; means over thousands of label tokens lie far closer. On a CPU
# torch sums the squares of a float32 gradient in float32 (measured 5e-5 off), DeepSpeed in float64.
LAYOUT_TOLERANCES = {"bf16": (3e-4, 1e-2), "fp32": (1e-5, 5e-4)}
COLUMNS = (
    ("samples/s", "samples_per_second", "9.2f"),
    ("tok/s", "real_tokens_per_second", "8.0f"),
    ("scaling", "scaling_efficiency", "7.0%"),
    ("step ms", "step_ms", "8.0f"),
    ("padding", "padding_ratio", "7.2f"),
    ("imbal. run", "token_imbalance", "10.3f"),
    ("step", "step_imbalance", "6.3f"),
    ("uneven", "uneven_steps", "6d"),
    ("covered", "ids_covered", "7d"),
    ("of", "ids_expected", "6d"),
    ("twice", "padding_duplicates", "5d"),
    ("lost", "ids_lost_or_doubled", "4d"),
    ("exch. ms", "exchange_ms_alone", "8.2f"),
    ("peak GB", "peak_gb", "7.1f"),
    ("orphans", "orphans", "7d"),
)


def conclude(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Latest line of each measurement, with scaling efficiencies and checks.

    Returns:
        ``trainings`` and ``evaluations`` (by name), ``ratios`` (of real tokens/s), ``layouts`` (against the
        first), ``not_measured`` (why), and ``checks`` (name to True, False, or None where nothing was
        measured).
    """
    latest = {line["what"]: line for line in lines if "failed" not in line and "skipped" not in line}
    trainings = {name: dict(line) for name, line in latest.items() if "steps_per_rank" in line}
    layout_lines = {name: trainings.pop(name) for name in list(trainings) if name.startswith("layout: ")}
    alone = {line["batches"]: line for line in trainings.values() if line["ranks"] == 1}
    for line in trainings.values():
        single = alone.get(line["batches"])
        if single and line["ranks"] > 1:
            ideal = line["ranks"] * single["real_tokens_per_second"]
            line["scaling_efficiency"] = line["real_tokens_per_second"] / ideal
    precision = "bf16" if latest.get("start", {}).get("cuda") else "fp32"
    layouts = compare_layouts(layout_lines, precision)
    evaluations = {
        name: line for name, line in latest.items() if name.startswith(("letters", "validation loss"))
    }
    agreements = [line for name, line in evaluations.items() if name.endswith("agreement")]
    ran = [*trainings.values(), *layout_lines.values(), *evaluations.values()]
    whole = [line for line in trainings.values() if line["whole_pass"]]
    return {
        "trainings": trainings,
        "ratios": ratios(trainings),
        "layouts": layouts,
        "evaluations": evaluations,
        "not_measured": {
            line["what"]: line.get("failed") or line.get("skipped")
            for line in lines
            if ("failed" in line or "skipped" in line)
            and not {line["what"], f"{line['what']}, agreement"} & set(latest)
        },
        "checks": {
            "no uneven step": _all(line["uneven_steps"] == 0 for line in trainings.values()),
            "all ids covered once": _all(line["audit_complete"] for line in whole),
            "loss equal across layouts": _all(line["equal"] for line in layouts.values()),
            "evaluations equal on all ranks and on one": _all(
                line["identical"] or line.get("equal_letters") == line["items"] for line in agreements
            ),
            "no orphan": _all(line["orphans"] == 0 for line in ran if "orphans" in line),
        },
    }


def ratios(trainings: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Real tokens/s of each ODB training by ZeRO-2 over those of the fixed batches by ZeRO-2."""
    speeds = {
        line["batches"]: line["real_tokens_per_second"]
        for line in trainings.values()
        if line["engine"] == "ZeRO-2"
    }
    fixed = {batches: speed for batches, speed in speeds.items() if batches.startswith("fixed")}
    best = max(fixed, key=lambda batches: fixed[batches], default=None)
    return {
        f"{batches} over {other}{' (best fixed)' if other == best and len(fixed) > 1 else ''}": speed
        / against
        for batches, speed in speeds.items()
        if batches not in fixed
        for other, against in fixed.items()
    }


def compare_layouts(lines: dict[str, dict[str, Any]], precision: str) -> dict[str, dict[str, Any]]:
    """Each layout against the first: largest relative differences over the steps."""
    names = sorted(lines, key=lambda name: lines[name]["ranks"])
    if not names:
        return {}
    first, found = lines[names[0]], {}
    for name in names[1:]:
        line = lines[name]
        same = line["samples"] == first["samples"] and line["labels"] == first["labels"]
        loss = _apart(line["losses"], first["losses"])
        norm = _apart(line["gradient_norms"], first["gradient_norms"])
        most_loss, most_norm = LAYOUT_TOLERANCES[precision]
        found[name] = {
            "against": names[0],
            "same_batches": same,
            "loss_difference": loss,
            "gradient_norm_difference": norm,
            "equal": same and loss <= most_loss and norm <= most_norm,
        }
    return found


def table(found: dict[str, Any]) -> str:
    """The conclusions as text."""
    header = f"{'training':<36}" + "".join(f" {title:>{_width(form)}}" for title, _, form in COLUMNS)
    rows = [header, "-" * len(header)]
    for name, line in found["trainings"].items():
        cells = (
            format(line[key], form) if line.get(key) is not None else " " * _width(form)
            for _, key, form in COLUMNS
        )
        rows.append(f"{name:<36} " + " ".join(cells))
        rows.append(f"    steps per rank {line['steps_per_rank']}, tokens per rank {line['tokens_per_rank']}")
    rows.append("")
    rows += [f"real tokens/s, {name}: {value:.2f}" for name, value in found["ratios"].items()]
    for part in ("layouts", "evaluations"):
        for name, line in found[part].items():
            shown = {key: value for key, value in line.items() if key not in ("at", "what")}
            rows.append(f"{name}: " + ", ".join(f"{key} {_short(value)}" for key, value in shown.items()))
    rows += [f"not measured: {name}: {why.splitlines()[0]}" for name, why in found["not_measured"].items()]
    words = {True: "yes", False: "NO", None: "not measured"}
    rows += ["", *(f"{name}: {words[value]}" for name, value in found["checks"].items())]
    return "\n".join(rows)


def record(lines: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of the run in ``results/examples``."""
    machines = [line for line in lines if line["what"] == "machine"]
    starts = [line for line in lines if line["what"] == "start"]
    first = machines[0] if machines else {}
    return {
        "what": "Training and evaluation on several GPUs: Qwen3-VL-2B architecture, random weights, "
        "MM-Mix-like synthetic data",
        "note": "Random weights and synthetic data: speeds and agreement of ranks, nothing about quality.",
        "provenance": {
            "commands": [line["command"] for line in starts],
            "commits": sorted({line["commit"] for line in found["trainings"].values() if line["commit"]}),
            "device": first.get("device"),
            "versions": starts[0]["versions"] if starts else {},
            "platform": starts[0]["platform"] if starts else None,
            "started": lines[0]["at"] if lines else None,
            "ended": lines[-1]["at"] if lines else None,
        },
        "data": next((line for line in lines if line["what"] == "prepared"), None),
        **found,
    }


def _all(values: Any) -> bool | None:
    values = list(values)
    return all(values) if values else None


def _apart(values: list[float], others: list[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(values, others, strict=True))


def _width(form: str) -> int:
    return int(form.partition(".")[0].rstrip("df%"))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
