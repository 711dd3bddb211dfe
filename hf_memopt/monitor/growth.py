"""Why memory grows over steps: a leak, fragmentation, longer data, or somebody else."""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

ADVICE = {
    "leak": "something keeps tensors from step to step: look for losses or outputs that are stored without detach() "
    "or item(), and for a growing cache; emptying the allocator's cache does not help",
    "fragmentation": "the allocator holds ever more than tensors need: set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True, or pad batches to few lengths",
    "longer data": "peaks follow the size of the batches: memory is as the data are; sort out the longest samples, or "
    "try the worst batch first (probe_worst_batch)",
    "other process": "another process takes ever more of this device",
}
_ENOUGH = 0.02  # of the capacity: growth below it is none
_KEPT = 200


@dataclass(frozen=True)
class Observation:
    """One optimizer step, in bytes (`elements`: a number).

    Attributes:
        resting: allocated after gradients were dropped.
        peak: the most that was allocated in the step.
        reserved: by the allocator.
        elements: tensor elements of the step's largest micro-batch.
        others: of other processes on the device.
    """

    resting: int
    peak: int
    reserved: int
    elements: int
    others: int = 0


class GrowthDiagnosis:
    """Collects observations and names what grows.

    Args:
        capacity: bytes of the device.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._seen: deque[Observation] = deque(maxlen=_KEPT)

    def observe(self, step: Observation) -> None:
        self._seen.append(step)

    def label(self) -> str | None:
        """leak, fragmentation, longer data, other process; None where nothing grows (or too little was seen)."""
        if len(self._seen) < 12:
            return None
        if self._grows(lambda step: step.resting, steadily=True):
            return "leak"
        if self._grows(lambda step: step.others):
            return "other process"
        if self._grows(lambda step: step.reserved - step.peak):
            return "fragmentation"
        if self._grows(lambda step: step.peak) and self._follows_the_data():
            return "longer data"
        return None

    def _grows(self, size, steadily: bool = False) -> bool:
        """Whether a size is larger at the end than at the beginning, by more than it varies between neighbours.

        Args:
            steadily: and in each quarter than in the one before.
        """
        sizes = [size(step) for step in self._seen]
        quarter = len(sizes) // 4
        medians = [median(sizes[start : start + quarter]) for start in range(0, 4 * quarter, quarter)]
        grown = medians[-1] - medians[0]
        noise = median(abs(after - before) for before, after in pairwise(sizes))
        if grown < max(_ENOUGH * self.capacity, 2 * noise):
            return False
        return not steadily or all(after > before for before, after in pairwise(medians))

    def _follows_the_data(self) -> bool:
        """Whether peaks and batch sizes rise and fall together (a correlation of 0.8 or more)."""
        peaks = [step.peak for step in self._seen]
        sizes = [step.elements for step in self._seen]
        mean_peak, mean_size = sum(peaks) / len(peaks), sum(sizes) / len(sizes)
        above = [(peak - mean_peak, size - mean_size) for peak, size in zip(peaks, sizes, strict=True)]
        spread = sum(a * a for a, _ in above) * sum(b * b for _, b in above)
        return spread > 0 and sum(a * b for a, b in above) / spread**0.5 >= 0.8
