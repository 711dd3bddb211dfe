"""Traces in parallel: each is work for Python on one core."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

_MAX_PROCESSES = 8  # each needs about as much memory as this process
_jobs: tuple[Callable, Sequence] | None = None


def one_by_one(function: Callable[[Any], Any], items: Sequence) -> list:
    """A function's results for all items."""
    return [function(item) for item in items]


def on_all_cores(function: Callable[[Any], Any], items: Sequence) -> list:
    """A function's results for all items, computed in forks of this process, one per core.

    Only results are pickled. Where a process cannot be forked (Windows, and after CUDA was initialised) this is
    one_by_one().
    """
    global _jobs
    cores = min(len(items), _cores())
    if cores < 2 or not _can_fork():
        return one_by_one(function, items)
    _jobs = (function, items)
    try:
        with ProcessPoolExecutor(cores, multiprocessing.get_context("fork"), _use_one_thread) as pool:
            return list(pool.map(_run_item, range(len(items))))
    except BrokenProcessPool:  # the system killed a fork, most likely because memory ran out
        return one_by_one(function, items)
    finally:
        _jobs = None


def _use_one_thread() -> None:
    """A fork lacks the parent's threads, for which torch's kernels would wait forever."""
    import torch

    torch.set_num_threads(1)


def _run_item(number: int):
    function, items = _jobs
    return function(items[number])


def _cores() -> int:
    """Cores that this process may use, where the system says so."""
    return min(_MAX_PROCESSES, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1


def _can_fork() -> bool:
    import torch

    # CUDA, XPU and process groups do not survive a fork.
    initialised = torch.cuda.is_initialized() or torch.xpu.is_initialized()
    return (
        "fork" in multiprocessing.get_all_start_methods()
        and not initialised
        and not torch.distributed.is_initialized()
    )
