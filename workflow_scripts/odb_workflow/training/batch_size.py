"""``--fixed-batch-size auto``: the largest fixed batch whose training step fits this device's memory.

Before training, forward and backward passes of the longest samples are tried with growing sizes. Their
gradients are thrown away; weights, optimizer and random generators are as before, so that a training with the
size found here equals one that was given the same number.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..runtime.errors import UserError
from .agreement import AllRanksError, Ranks
from .book import process_peak_bytes
from .data import TrainingData
from .engines import Engine
from .resume import random_state, set_random_state
from .steps import Mover

logger = logging.getLogger(__name__)

USABLE_SHARE = {"cuda": 0.90, "cpu": 0.75}
"""Share of the free memory that a step may take: the rest is fragmentation on a GPU, loader processes and
what other programs will want on a CPU."""
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
RESOLUTION = 16
"""The search ends within one part in so many of the limit; the margin above is larger."""


def largest_size(fits: Callable[[int], bool], most: int) -> int:
    """The largest size from 1 to ``most`` that fits, 0 where not even 1 does.

    Sizes are doubled until one does not fit, then the gap is halved: exact up to 2 x ``RESOLUTION``, beyond
    within one part in ``RESOLUTION``. No size above the first one that failed is ever tried.
    """
    good, size = 0, 1
    while good < most:
        size = min(max(2 * good, 1), most)
        if not fits(size):
            break
        good = size
    else:
        return good
    bad = size
    while bad - good > max(1, good // RESOLUTION):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


class StepRehearsal:
    """Tries training steps of this rank and says whether they fit.

    On a GPU a size fits if it does not run out of memory and stays below the limit, with the optimizer's
    states, which the first step allocates, held in reserve. On a CPU running out ends the process, so that a
    size is tried only if growth in proportion to the largest size measured so far stays below the limit.

    Args:
        data, collate, mover, engine: as in training.
    """

    def __init__(
        self,
        data: TrainingData,
        collate: Callable[[list[dict]], dict[str, Any]],
        mover: Mover,
        engine: Engine,
    ) -> None:
        self._dataset, self._collate, self._mover = data.dataset, collate, mover
        self._engine, self._device = engine, mover.device
        self._longest_first = np.argsort(-data.lengths, kind="stable")
        self._samples: list[dict] = []
        self.on_gpu = self._device.type == "cuda"
        self.reserved_bytes = engine.pending_bytes()
        if self.on_gpu:
            free = torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)
        else:
            free = available_bytes() // _ranks_of_this_host()
            self._before = resident_bytes()
        self.limit_bytes = int(free * USABLE_SHARE[self._device.type])
        self.tried: dict[int, int | None] = {}
        self._largest: tuple[int, int] | None = None

    def fits(self, size: int) -> bool:
        """Whether a step on the ``size`` longest samples fits; ``tried`` notes its bytes (None: ran out)."""
        expected = 0
        if not self.on_gpu and self._largest:
            expected = self._largest[1] * size // self._largest[0] + self.reserved_bytes
        try:
            used = expected if expected > self.limit_bytes else self._measure(size)
        finally:
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
        self.tried[size] = used
        return used is not None and used <= self.limit_bytes

    def _measure(self, size: int) -> int | None:
        for position in self._longest_first[len(self._samples) : size].tolist():
            self._samples.append(self._dataset[position])
        if self.on_gpu:
            return self._measure_gpu(size)
        forget_peak()
        self._step(size)
        grown = max(process_peak_bytes() - self._before, 1)
        self._largest = (size, grown)
        return grown + self.reserved_bytes

    def _measure_gpu(self, size: int) -> int | None:
        torch.cuda.reset_peak_memory_stats(self._device)
        reserve = None
        try:
            reserve = torch.empty(self.reserved_bytes, dtype=torch.uint8, device=self._device)
            self._step(size)
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:  # OutOfMemoryError is one; libraries of CUDA have their own words
            if not any(words in str(error) for words in OUT_OF_MEMORY):
                raise
            return None
        finally:
            del reserve
        return int(torch.cuda.max_memory_allocated(self._device))

    def _step(self, size: int) -> None:
        self._engine.rehearse(self._mover(self._collate(self._samples[:size])))


def choose_batch_size(rehearsal: StepRehearsal, plan: Any, most: int, ranks: Ranks) -> dict[str, Any]:
    """Find the size that fits on every rank; called on all ranks.

    Args:
        plan: the forward's ``CheckpointPlan``, whose measurements are put back; None without one.
        most: samples of a rank in an epoch.

    Returns:
        ``size``, and how it was found: ``per_rank``, and of rank 0 ``tried`` (size: bytes, null for out of
        memory), ``limit_bytes`` and ``reserved_bytes`` (optimizer states).

    Raises:
        UserError: on all ranks, where the longest sample alone does not fit on one of them.
    """
    random, planned = random_state(), dict(vars(plan)) if plan else {}
    try:
        mine = largest_size(rehearsal.fits, most)
    finally:
        set_random_state(random)
        if plan:
            vars(plan).update(planned)
        if rehearsal.on_gpu:  # the summary tells the training's own peak
            torch.cuda.reset_peak_memory_stats()
        else:
            forget_peak()
    per_rank = ranks.gather_objects(mine)
    found = {
        "size": min(per_rank),
        "per_rank": per_rank,
        "tried": {str(size): used for size, used in rehearsal.tried.items()},
        "limit_bytes": rehearsal.limit_bytes,
        "reserved_bytes": rehearsal.reserved_bytes,
    }
    if found["size"] < 1:
        raise AllRanksError(
            f"not even a batch of one sample fits the memory of rank {per_rank.index(0)} "
            f"(limit {rehearsal.limit_bytes / 1e9:.1f} GB)",
            where="--fixed-batch-size auto",
            fix="lower --max-length or --image-max-pixels, use --gradient-checkpointing on, or free memory",
        )
    told = ", ".join(f"{size}: {_gigabytes(used)}" for size, used in rehearsal.tried.items())
    logger.info(
        "fixed batch size %d (of at most %d), the largest whose longest samples fit %.2f GB on every rank; "
        "tried %s, %.2f GB of them for optimizer states",
        found["size"],
        most,
        rehearsal.limit_bytes / 1e9,
        told,
        rehearsal.reserved_bytes / 1e9,
    )
    return found


def _gigabytes(used: int | None) -> str:
    return "out of memory" if used is None else f"{used / 1e9:.2f} GB"


def available_bytes() -> int:
    """Host memory that this process can still take: of the machine, or of its control group if that is less.

    Raises:
        UserError: the system does not tell (no Linux).
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration) as error:
        raise UserError(
            "this system does not tell how much memory is free",
            where="--fixed-batch-size auto",
            fix="give a number",
        ) from error
    return min([free, *_control_group_bytes()])


def _ranks_of_this_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def _control_group_bytes(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Free bytes below the limit of the control group (version 2); none where there is no limit."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        stat = (root / "memory.stat").read_text().splitlines()
        cache = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
        return [max(limit - used + cache, 0)]
    return []


def resident_bytes() -> int:
    """Memory of this process now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peak() -> None:
    """Let the peak of ``process_peak_bytes`` begin anew; where that is not allowed it stays too large, which
    only makes the search more careful."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
