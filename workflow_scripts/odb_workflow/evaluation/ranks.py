"""The ranks of one evaluation: start, agreement on errors, exchange of small Python values.

Works under ``accelerate launch``, ``torchrun``, ``srun`` and plain ``python``; gloo on CPU, NCCL on GPUs.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from odb_workflow.runtime.errors import UserError

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
#: Ranks finish at different times and wait for each other; the default of 10 to 30 minutes would end long
#: runs.
TIMEOUT = datetime.timedelta(hours=12)
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
#: A rank without the error waits this long, so that the launcher does not kill the rank that prints it.
_QUIET_EXIT_SECONDS = 2.0


@dataclass(frozen=True)
class EvaluationRanks:
    """This process among its peers."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which reads, writes and speaks for all."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        return self._exchange(lambda: broadcast_object_list([value])[0]) if self.world_size > 1 else value

    def gather(self, value: Value) -> list[Value]:
        """The value of each rank, in rank order, on every rank."""
        return self._exchange(lambda: gather_object([value])) if self.world_size > 1 else [value]

    def _exchange(self, exchange: Callable[[], Any]) -> Any:
        try:
            return exchange()
        except RuntimeError as error:
            if not any(words in str(error) for words in _PEER_IS_GONE):
                raise
            if not self.main:
                leave_quietly()
            raise UserError("another rank ended; its own message says why") from error

    def main_only(self, function: Callable[[], Value]) -> Value:
        """Run ``function`` on rank 0 and return its value on every rank.

        Raises:
            UserError: on rank 0, if ``function`` raised it there; the other ranks exit without a word.
        """
        result, error = None, None
        if self.main:
            try:
                result = function()
            except UserError as caught:
                error = caught
        result, failed = self.broadcast((result, error is not None))
        if error is not None:
            raise error
        if failed:
            leave_quietly()
        return result

    def together(self, function: Callable[[], Value]) -> Value:
        """Run ``function`` on every rank; if any rank meets a user error, rank 0 raises the first of them.

        Raises:
            UserError: on rank 0, naming the fault; the other ranks exit without a word.
        """
        result, error = None, None
        try:
            result = function()
        except UserError as caught:
            error = caught
        faults = [fault for fault in self.gather(_parts(error)) if fault is not None]
        if faults and self.main:
            raise error or UserError(faults[0][0], where=faults[0][1], fix=faults[0][2])
        if faults:
            leave_quietly()
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Leave the process group, so that no warning follows the last line."""
        if self.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def start_ranks(device: str = "auto") -> EvaluationRanks:
    """Join the process group that the launcher describes; a single process without one is rank 0 of 1.

    Args:
        device: ``auto`` (GPU if there is one), ``cuda`` or ``cpu``.

    Raises:
        UserError: a GPU is asked for and there is none, or there are more ranks on this host than GPUs.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no GPU is visible", where="--device cuda", fix="use --device auto or cpu")
    # Without `cpu` accelerate starts one process of its own on each rank where there is no GPU.
    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), timeout=TIMEOUT)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or state.num_processes)
    if state.device.type == "cuda" and local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{local_world_size} ranks on this host share {torch.cuda.device_count()} GPU(s)",
            where="number of evaluation processes",
            fix="start one rank per GPU, or use --device cpu",
        )
    if state.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    return EvaluationRanks(state.process_index, state.num_processes, local_world_size, state.device)


def leave_quietly() -> None:
    """End a rank whose peer reports the error."""
    time.sleep(_QUIET_EXIT_SECONDS)
    raise SystemExit(1)


def _parts(error: UserError | None) -> tuple[str, str | None, str | None] | None:
    return None if error is None else (error.what, error.where, error.fix)
