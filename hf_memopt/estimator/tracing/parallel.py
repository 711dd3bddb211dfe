"""Traces in parallel: each is work for Python on one core."""

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hf_memopt.confined.rights import die_with

_MAX_PROCESSES = 8  # each needs about as much memory as this process
# Two traces take a second, and a fork what it saves: it copies the pages that it writes to, and what it remembers of
# shapes ends with it.
_FEWEST = 3  # items
# A fork that is not stuck may share its core with other programs.
_PATIENCE = 60  # seconds
_TIMES_SLOWER = 4  # than this process, which computes a share of its own meanwhile
_warm = False  # a first item has run in this process


def one_by_one(function: Callable[[Any], Any], items: Sequence) -> list:
    """A function's results for all items."""
    return [function(item) for item in items]


def on_all_cores(function: Callable[[Any], Any], items: Sequence) -> list:
    """A function's results for all items, computed by this process and forks of it, one per core.

    Only results are pickled. For fewer than _FEWEST items, and where a process cannot be forked (Windows, and after
    CUDA was initialised), this is one_by_one(). The first item of all runs before the first fork, and this process
    works, too: what a trace imports and remembers (accounting.fake_outputs), later forks have then. What a fork does
    not deliver is computed here.
    """
    global _warm
    cores = min(len(items), _cores())
    if cores < 2 or len(items) < _FEWEST or not _can_fork():
        _warm = _warm or bool(items)
        return one_by_one(function, items)
    if not _warm:
        first = function(items[0])
        _warm = True
        return [first, *on_all_cores(function, items[1:])]
    own, *shares = _shares(len(items), cores)
    forks = [_Fork(function, items, share) for share in shares]
    try:
        began = time.monotonic()
        results = _run_items(function, items, own)
        patience = _PATIENCE + _TIMES_SLOWER * (time.monotonic() - began)
        for fork in forks:
            results |= fork.results(patience) or _run_items(function, items, fork.share)
    finally:
        for fork in forks:
            fork.end()
    return [results[number] for number in range(len(items))]


class _Fork:
    """A copy of this process that computes a share of the items, and ends with this process, however that ends.

    A fork has one thread, and a lock that another thread held is held in it for ever: one that says nothing long after
    this process is done is taken for stuck.
    """

    def __init__(self, function: Callable[[Any], Any], items: Sequence, share: list[int]) -> None:
        context = multiprocessing.get_context("fork")
        self.share = share
        self._answer, answer = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(function, items, share, answer, os.getpid()), daemon=True)
        self._process.start()
        answer.close()

    def results(self, patience: float) -> dict[int, Any] | None:
        """Number of an item -> its result; None where the fork was ended (most likely because memory ran out) or is
        stuck.

        Args:
            patience: seconds to wait for.

        Raises:
            Exception: what the function raised in the fork.
        """
        try:
            answer = self._answer.recv() if self._answer.poll(patience) else None
        except EOFError:
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._answer.close()


def _work(function: Callable[[Any], Any], items: Sequence, share: list[int], answer, parent: int) -> None:
    """The work of a fork. It lacks the parent's threads, for which torch's kernels would wait forever."""
    import torch

    die_with(parent)
    torch.set_num_threads(1)
    if not _has_autograd():
        answer.close()  # this process's share is computed by the parent
        return
    try:
        results: Any = _run_items(function, items, share)
    except Exception as error:
        results = error
    answer.send(results)
    answer.close()


def _has_autograd() -> bool:
    """False in a fork of a process whose autograd has started threads, which builds for accelerators do at the first
    backward pass: there it raises ("autograd's threading … fork-based multiprocessing")."""
    import torch

    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _run_items(function: Callable[[Any], Any], items: Sequence, numbers: list[int]) -> dict[int, Any]:
    return {number: function(items[number]) for number in numbers}


def _shares(count: int, cores: int) -> list[list[int]]:
    """Which items each process computes: neighbours together, such as the two traces of a job, because what the first
    of them remembers makes the second faster."""
    ends = [count * number // cores for number in range(cores + 1)]  # this process's share is the smallest
    return [list(range(start, end)) for start, end in itertools.pairwise(ends)]


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
