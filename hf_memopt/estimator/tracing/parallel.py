"""Traces in parallel: each is work for Python on one core."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

_MAX_PROCESSES = 8  # each needs about as much memory as this process
_jobs: tuple[Callable, Sequence] | None = None
_warm = False  # a first item has run in this process


def one_by_one(function: Callable[[Any], Any], items: Sequence) -> list:
    """A function's results for all items."""
    return [function(item) for item in items]


def on_all_cores(function: Callable[[Any], Any], items: Sequence) -> list:
    """A function's results for all items, computed by this process and forks of it, one per core.

    Only results are pickled. Where a process cannot be forked (Windows, and after CUDA was initialised) this is
    one_by_one(). The first item of all runs before the first fork, and this process works, too: what a trace imports
    and remembers (accounting.fake_outputs), later forks have then.
    """
    global _jobs, _warm
    cores = min(len(items), _cores())
    if cores < 2 or not _can_fork():
        return one_by_one(function, items)
    if not _warm:
        first = function(items[0])
        _warm = True
        return [first, *on_all_cores(function, items[1:])]
    shares = _shares(len(items), cores)
    _jobs = (function, items)
    try:
        with ProcessPoolExecutor(cores - 1, multiprocessing.get_context("fork"), _use_one_thread) as pool:
            others = [pool.submit(_run_items, share) for share in shares[1:]]
            results = _run_items(shares[0])
            for other in others:
                results |= other.result()
    except BrokenProcessPool:  # the system killed a fork, most likely because memory ran out
        return one_by_one(function, items)
    finally:
        _jobs = None
    return [results[number] for number in range(len(items))]


def _shares(count: int, cores: int) -> list[list[int]]:
    """Which items each process computes: there and back, because the deeper of a job's two traces takes longer."""
    order = [*range(cores), *reversed(range(cores))]
    shares: list[list[int]] = [[] for _ in range(cores)]
    for number in range(count):
        shares[order[number % len(order)]].append(number)
    return shares


def _use_one_thread() -> None:
    """A fork lacks the parent's threads, for which torch's kernels would wait forever."""
    import torch

    torch.set_num_threads(1)


def _run_items(numbers: list[int]) -> dict[int, Any]:
    function, items = _jobs
    return {number: function(items[number]) for number in numbers}


def _cores() -> int:
    """Cores that this process may use, where the system says so."""
    return min(_MAX_PROCESSES, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1


def _can_fork() -> bool:
    import torch

    # CUDA, XPU and process groups do not survive a fork.
    initialised = torch.cuda.is_initialized() or torch.xpu.is_initialized()
    return (
        "fork" in multiprocessing.get_all_start_methods()
        and sys.platform != "darwin"  # whose system libraries crash in a fork of a process that has used them
        and not initialised
        and not torch.distributed.is_initialized()
    )
