"""The answer: a peak, when it comes, what it consists of, and whether it fits."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """Predicted memory of a training job on one device. Everything is in bytes.

    Attributes:
        peak_allocated_bytes: what `torch.cuda.max_memory_allocated` reports over a run, or the CPU allocator's peak.
        phase: load | forward | backward | optimizer, where the peak comes.
        breakdown: kind -> bytes at the peak, which sum to it.
        phases: phase -> its own peak.
        capacity_bytes: what the device offers to a job; None where it is not known.
        training_arguments: as resolved.
        notes: what the number does and does not cover.
    """

    peak_allocated_bytes: int
    phase: str
    breakdown: dict[str, int]
    phases: dict[str, int]
    capacity_bytes: int | None
    training_arguments: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the allocated peak is within the capacity; None where the capacity is not known."""
        return None if self.capacity_bytes is None else self.peak_allocated_bytes <= self.capacity_bytes

    def to_dict(self) -> dict[str, Any]:
        """The estimate as one JSON object."""
        return {
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "phase": self.phase,
            "breakdown": self.breakdown,
            "phases": self.phases,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "training_arguments": self.training_arguments,
            "notes": list(self.notes),
        }
