"""Ordered parallel map over chunks with a bounded number in flight."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from ..runtime.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

_function: Callable | None = None
_PR_SET_PDEATHSIG = 1


def available_processes() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):  # Linux: a killed parent leaves no worker behind
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the processes are the parallelism


def _call(task: Task) -> Result:
    return _function(task)


def ordered_map(
    function: Callable[[Task], Result], tasks: Iterable[Task], processes: int
) -> Iterator[Result]:
    """``map(function, tasks)`` in order over forked processes; ``function`` itself is inherited, never
    pickled.

    At most ``2 * processes + 2`` tasks are in flight, so memory does not grow with the number of tasks.

    Raises:
        UserError: a worker was killed (usually for memory).
    """
    if processes <= 1:
        yield from map(function, tasks)
        return
    global _function
    _function = function
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _start_worker)
    pending: deque = deque()
    finished = False
    try:
        for task in tasks:
            pending.append(executor.submit(_call, task))
            if len(pending) > 2 * processes + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        finished = True
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, usually because memory ran out",
            fix="use fewer processes, or a machine with more memory",
        ) from error
    finally:
        if not finished:  # do not wait for chunks that nobody will read
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
        executor.shutdown(wait=True, cancel_futures=True)
        _function = None
