"""Reasons for memory that grows over steps: a leak, fragmentation, longer samples, or another process."""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import StatisticsError, correlation, median

ADVICE = {
    "leak": "something keeps tensors from step to step: look for losses or outputs stored without detach() or "
    "item(), and for a growing cache; emptying the allocator's cache does not help",
    "fragmentation": "the allocator reserves more and more than tensors need: set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True, or pad batches to few lengths",
    "longer data": "peaks follow the size of the batches: remove or shorten the longest samples, or try the largest "
    "batch first (probe_worst_batch)",
    "other process": "another process uses more and more of this device",
}
_MIN_GROWTH = 0.02  # of the capacity; less is noise
_KEPT = 200  # optimizer steps
_FEWEST = 12  # steps: three in each quarter that is compared


@dataclass(frozen=True)
class Observation:
    """Memory in one optimizer step, in bytes.

    Attributes:
        resting: allocated after zero_grad.
        peak: most bytes allocated within the step.
        reserved: held by the allocator.
        elements: tensor elements in the step's micro-batches.
        used_elsewhere: by other processes on the device.
    """

    resting: int
    peak: int
    reserved: int
    elements: int
    used_elsewhere: int = 0


class GrowthDiagnosis:
    """Collects observations and names the cause of growth.

    Args:
        capacity: bytes of the device.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._seen: deque[Observation] = deque(maxlen=_KEPT)

    def observe(self, step: Observation) -> None:
        self._seen.append(step)

    def label(self) -> str | None:
        """leak, fragmentation, longer data, other process; None where nothing grows, or before enough steps."""
        if len(self._seen) < _FEWEST:
            return None
        if self._grows(lambda step: step.resting, steadily=True):
            return "leak"
        if self._grows(lambda step: step.used_elsewhere):
            return "other process"
        if self._grows(lambda step: step.reserved - step.peak):
            return "fragmentation"
        return "longer data" if self._grows(lambda step: step.peak) and self._follows_the_data() else None

    def _grows(self, size, steadily: bool = False) -> bool:
        """True if a size is larger at the end than at the beginning, by more than it varies between neighbours.

        Args:
            steadily: in each quarter more than in the one before.
        """
        sizes = [size(step) for step in self._seen]
        quarter = len(sizes) // 4
        medians = [median(sizes[start : start + quarter]) for start in range(0, 4 * quarter, quarter)]
        grown = medians[-1] - medians[0]
        noise = median(abs(after - before) for before, after in pairwise(sizes))
        if grown < max(_MIN_GROWTH * self.capacity, 2 * noise):
            return False
        return not steadily or all(after > before for before, after in pairwise(medians))

    def _follows_the_data(self) -> bool:
        """True if peaks and batch sizes rise and fall together (a correlation of 0.8 or more)."""
        try:
            return correlation([step.peak for step in self._seen], [step.elements for step in self._seen]) >= 0.8
        except StatisticsError:  # peaks or sizes are all the same
            return False
