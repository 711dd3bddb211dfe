"""How much of training is waiting: for batches, and for the disk."""

import time
from collections.abc import Callable, Iterator

import psutil


class DataWait:
    """The share of training steps' time that went by before their batches were there; logging, evaluation and saving
    belong to no step.

    Who fetches the batches through timed() is measured exactly. For any other Trainer the wait lasts from the last of
    these (or the step before) to on_step_begin: transformers 5.23 fetches all micro-batches of a step there. What
    callbacks behind this one take at the end of a step counts as waiting then. On a GPU the optimizer's kernels may
    still run while the next batch is fetched, so that the device waits a little less than is said.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._free_since: float | None = None
        self._arrived: float | None = None
        self._fetching: float | None = None  # seconds, where timed() measures
        self._steps = 0
        self._since_share = _Seconds()
        self._run = _Seconds()

    def free(self) -> None:
        """Training is between two steps, and the last thing that it did has ended."""
        self._free_since, self._fetching = self._clock(), None

    def timed(self, batches: Iterator) -> Iterator:
        """The same batches, each timed while it is waited for."""
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
        """The batches are there."""
        self._arrived = self._clock()

    def step_ends(self) -> None:
        """Count a step, and begin to wait for the next."""
        now = self._clock()
        if self._arrived is not None and self._free_since is not None:
            waited = self._arrived - self._free_since if self._fetching is None else self._fetching
            altogether = waited + now - self._arrived
            self._since_share.add(waited, altogether)
            self._steps += 1
            if self._steps > 1:  # the first waits for the workers to start
                self._run.add(waited, altogether)
        self._free_since, self._arrived, self._fetching = now, None, None

    def share(self) -> float | None:
        """Of the steps since the last call, 0 to 1; None where there were none."""
        found, self._since_share = self._since_share.share(), _Seconds()
        return found

    def share_of_run(self) -> float | None:
        """Of all steps but the first, 0 to 1; None where there were none."""
        return self._run.share()


class _Seconds:
    """Seconds waited, of seconds altogether."""

    def __init__(self) -> None:
        self.waited = self.altogether = 0.0

    def add(self, waited: float, altogether: float) -> None:
        self.waited += waited
        self.altogether += altogether

    def share(self) -> float | None:
        return min(1.0, self.waited / self.altogether) if self.altogether else None


class DiskWait:
    """The share of this machine's processor time that nothing ran in because reads and writes had not ended.

    Linux alone counts it (`iowait` in /proc/stat), for the whole machine: other programs' disk access is in it.
    """

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float | None:
        """Since the last call, 0 to 1; None where the system does not count it."""
        before, now = self._before, psutil.cpu_times()
        self._before = now
        if not hasattr(now, "iowait"):
            return None
        # guest times are in user's already (man 5 proc).
        names = [name for name in now._fields if not name.startswith("guest")]
        altogether = sum(getattr(now, name) - getattr(before, name) for name in names)
        return max(0.0, now.iowait - before.iowait) / altogether if altogether > 0 else None
