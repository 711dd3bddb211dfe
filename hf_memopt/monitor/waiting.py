"""The share of training time that is spent waiting for batches and for the disk."""

import time
from collections.abc import Callable, Iterator

import psutil


class DataWait:
    """Share of step time spent waiting for batches. Logging, evaluation and saving do not count as step time.

    A trainer that fetches its batches through timed() is measured exactly. For any other Trainer the wait lasts from
    the end of the last step, log, evaluation or save to on_step_begin, in between which transformers 5.23 fetches all
    micro-batches of a step; time in later callbacks of on_step_end counts as waiting too. On a GPU the optimizer's
    kernels may still run while the next batch is fetched, so the device waits slightly less than reported.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting_since: float | None = None
        self._arrived: float | None = None
        self._fetching: float | None = None  # seconds spent in timed(), where it is used
        self._steps = 0
        self._since_share = _Seconds()
        self._run = _Seconds()

    def reset(self) -> None:
        """Start to wait now: a log, evaluation or save between two steps has ended."""
        self._waiting_since, self._fetching = self._clock(), None

    def timed(self, batches: Iterator) -> Iterator:
        """The same batches; measures the time that each takes to arrive."""
        while True:
            start = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._fetching = (self._fetching or 0.0) + self._clock() - start
            yield batch

    def step_begins(self) -> None:
        """The batches of a step have arrived."""
        self._arrived = self._clock()

    def step_ends(self) -> None:
        """Count a step, and start to wait for the next."""
        end = self._clock()
        if self._arrived is not None and self._waiting_since is not None:
            waited = self._arrived - self._waiting_since if self._fetching is None else self._fetching
            total = waited + end - self._arrived
            self._since_share.add(waited, total)
            self._steps += 1
            if self._steps > 1:  # the first includes the start of the workers
                self._run.add(waited, total)
        self._waiting_since, self._arrived, self._fetching = end, None, None

    def share(self) -> float | None:
        """The share of the steps since the last call, 0 to 1; None where there were none."""
        share, self._since_share = self._since_share.share(), _Seconds()
        return share

    def steps_of_run(self) -> tuple[int, float]:
        """All steps but the first, and the seconds that they took without waiting for batches."""
        return max(0, self._steps - 1), self._run.total - self._run.waited

    def share_of_run(self) -> float | None:
        """The share of all steps but the first, 0 to 1; None where there were none."""
        return self._run.share()


class _Seconds:
    """Seconds waited, and seconds in total."""

    def __init__(self) -> None:
        self.waited = self.total = 0.0

    def add(self, waited: float, total: float) -> None:
        self.waited += waited
        self.total += total

    def share(self) -> float | None:
        return min(1.0, self.waited / self.total) if self.total else None


class DiskWait:
    """Share of the machine's processor time that was idle because of pending disk reads and writes.

    Only Linux counts it (`iowait` in /proc/stat), for the whole machine, other programs' disk access included.
    """

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float | None:
        """Since the last call, 0 to 1; None where the system does not count it."""
        before, times = self._before, psutil.cpu_times()
        self._before = times
        if not hasattr(times, "iowait"):
            return None
        # user and nice include the guest times (man 5 proc).
        names = [name for name in times._fields if not name.startswith("guest")]
        total = sum(getattr(times, name) - getattr(before, name) for name in names)
        return max(0.0, times.iowait - before.iowait) / total if total > 0 else None
