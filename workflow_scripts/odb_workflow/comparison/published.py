"""Published figures of the original examples, as labelled reference rows. Not measured by this workflow."""

from __future__ import annotations

from typing import Any

SETTING = "8x H20, full public MM-Mix split, one epoch"

# path, fixed and ODB samples/s, ratio, fixed and ODB validation loss, fixed and ODB MMMU-MC
_FIGURES = (
    ("Accelerate", 36.38, 92.23, 2.54, 1.0150, 1.0744, 42.71, 45.76),
    ("HF Trainer", 18.92, 50.53, 2.67, 1.0363, 1.0302, 43.41, 48.35),
    ("Lightning", 35.28, 92.32, 2.62, 1.0223, 1.0825, 43.06, 45.65),
    ("LLaMA-Factory, 1 node", 13.59, 41.01, 3.02, 1.0297, 1.0604, 42.71, 47.06),
    ("LLaMA-Factory, 2 nodes", 15.60, 67.17, 4.31, 1.0309, 1.0799, 43.88, 47.29),
)


def published_rows() -> list[dict[str, Any]]:
    """Two rows per published path: fixed batches and ODB."""
    rows = []
    for path, fixed, odb, ratio, loss_fixed, loss_odb, mmmu_fixed, mmmu_odb in _FIGURES:
        for loader, speed, times, loss, accuracy in (
            ("fixed batches", fixed, 1.0, loss_fixed, mmmu_fixed),
            ("ODB", odb, ratio, loss_odb, mmmu_odb),
        ):
            rows.append(
                {
                    "path": path,
                    "loader": loader,
                    "samples_per_second": speed,
                    "speedup": times,
                    "eval_loss": loss,
                    "mmmu_accuracy": round(accuracy / 100, 4),
                    "setting": SETTING,
                    "origin": "published, not measured here",
                }
            )
    return rows
