"""Traces beside each other: every one is Python's work, and a machine has several cores."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

_MOST = 8
_jobs: tuple[Callable, Sequence] | None = None


def one_by_one(function: Callable[[Any], Any], items: Sequence) -> list:
    """A function's results for all items."""
    return [function(item) for item in items]


def on_all_cores(function: Callable[[Any], Any], items: Sequence) -> list:
    """A function's results for all items, worked out in copies of this process, one a core.

    Only what comes back travels between processes. Where processes cannot be copied (Windows, and after CUDA was
    started) the items are worked through one by one.
    """
    global _jobs
    cores = min(len(items), _cores())
    if cores < 2 or not _can_copy():
        return one_by_one(function, items)
    _jobs = (function, items)
    try:
        with ProcessPoolExecutor(cores, multiprocessing.get_context("fork"), _alone) as pool:
            return list(pool.map(_one, range(len(items))))
    except BrokenProcessPool:  # the system ended a copy, most likely for memory
        return one_by_one(function, items)
    finally:
        _jobs = None


def _alone() -> None:
    """A copy has none of the threads that torch's kernels would wait for."""
    import torch

    torch.set_num_threads(1)


def _one(number: int):
    function, items = _jobs
    return function(items[number])


def _cores() -> int:
    """Those that this process may use, where the system tells; more than a few copies would take much memory."""
    return min(_MOST, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1


def _can_copy() -> bool:
    import torch

    started = torch.cuda.is_initialized() or torch.xpu.is_initialized()
    return "fork" in multiprocessing.get_all_start_methods() and not started and not torch.distributed.is_initialized()
