"""The result of an estimate: the peak, its phase, what it consists of, and whether it fits."""

from dataclasses import dataclass, field, fields
from typing import Any

from hf_memopt.units import size

NOT_IN_JSON = ("timeline", "paged_bytes", "generation_share", "speed_setup", "own_runs")


@dataclass(frozen=True)
class Estimate:
    """Predicted memory of a training job on one of its devices. Everything is in bytes.

    Attributes:
        peak_allocated_bytes: what `torch.cuda.max_memory_allocated` reports over a run, or the CPU allocator's peak.
        peak_reserved_bytes: what the caching allocator reserves for it, as the job configures it: presets set
            expandable segments on CUDA, a script or plain settings may not.
        reserved_bytes: the same with expandable segments ("expandable") and without ("segments").
        device_bytes: reserved bytes and the process's context: what nvidia-smi shows.
        paged_bytes: of device_bytes, paged optimizer states, which leave the device where it has no room for them;
            not part of to_dict().
        host_bytes: host memory of one process.
        phase: load | forward | backward | optimizer | eval | save, in which the peak occurs.
        breakdown: kind -> bytes at the peak, which sum to it.
        phases: phase -> its own peak.
        capacity_bytes: what the device offers to a job; None where it is not known.
        training_arguments: as resolved.
        notes: what the numbers do and do not cover.
        estimated: the job in one line: dtype, optimizer, checkpointing, attention, loss, engine, micro-batch ×
            accumulation × processes.
        step_seconds, tokens_per_second, mfu, speed_error: predicted speed (estimator.timing.throughput.Throughput);
            None where it is unknown, which the notes explain.
        generation_share: of step_seconds, in which completions are generated; in to_dict() a note says it.
        speed_setup, own_runs: what of the user's own runs counts for the speed (Throughput); a note says it, too.
        timeline: (segment, bytes) at equal numbers of allocations, from loading to the end of what is traced: a step,
            two of an engine, of a few micro-batches; not part of to_dict().
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    host_bytes: int
    phase: str
    breakdown: dict[str, int]
    phases: dict[str, int]
    capacity_bytes: int | None
    training_arguments: dict[str, Any] = field(repr=False)
    notes: tuple[str, ...]
    reserved_bytes: dict[str, int] = field(default_factory=dict)
    estimated: str = ""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    speed_kind: str | None = None
    speed_error: float | None = None
    timeline: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    paged_bytes: int = field(default=0, repr=False)
    generation_share: float | None = field(default=None, repr=False)
    speed_setup: str | None = field(default=None, repr=False)
    own_runs: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        verdict = {True: "fits", False: "does not fit", None: "capacity unknown"}[self.fits]
        parts = ", ".join(f"{kind.replace('_', ' ')} {size(part)}" for kind, part in self.breakdown.items() if part)
        speed = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else ""
        return (
            f"{size(self.device_bytes)} of {size(self.capacity_bytes)} predicted, {verdict}{speed}\n"
            f"peak in {self.phase}: {parts}\n"
            f"allocated {size(self.peak_allocated_bytes)}, reserved {size(self.peak_reserved_bytes)}, "
            f"host {size(self.host_bytes)}"
        )

    @property
    def fits(self) -> bool | None:
        """True if `device_bytes` is within the capacity; None where the capacity is not known."""
        return None if self.capacity_bytes is None else self.device_bytes <= self.capacity_bytes

    def to_dict(self) -> dict[str, Any]:
        """The estimate as one JSON object."""
        names = (item.name for item in fields(self) if item.name not in NOT_IN_JSON)
        return {name: getattr(self, name) for name in names} | {
            "fits": self.fits,
            "notes": list(self.notes),
        }
