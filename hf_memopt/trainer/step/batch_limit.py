"""How much of a micro-batch runs at once: halved when memory is short, doubled again after quiet steps."""

from math import ceil, prod
from typing import TYPE_CHECKING

from hf_memopt.oom.classify import free_memory
from hf_memopt.trainer.step.split import count_tokens

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

_MIN_SAVING = 0.02  # of the capacity: activations must be at least this much for smaller chunks to help


class BatchLimit:
    """The largest chunk to run, in tensor elements, so that a batch of short samples stays whole where one of long
    samples is split.

    The limit is halved when memory runs out (or nearly does) and doubled after a number of steps without trouble. Each
    failure doubles that number, so that sizes do not oscillate.

    Attributes:
        elements: tensor elements of the largest chunk; None for no limit.
        min_samples: fewest samples in a chunk.
    """

    def __init__(self, patience: int, min_samples: int = 1, first_samples: int | None = None) -> None:
        """Args:
        patience: optimizer steps without trouble before the limit grows for the first time.
        min_samples: fewest samples in a chunk.
        first_samples: most samples in a chunk of the first batch; by default all of them.
        """
        self.elements: int | None = None
        self.min_samples = min_samples
        self._first_samples = first_samples
        self._patience = patience
        self._quiet_steps = 0
        self._largest = 0  # elements of the largest micro-batch so far

    def chunk_size(self, samples: int, elements: int) -> int:
        """Samples in each chunk of a batch of `samples` samples and `elements` tensor elements, evenly divided."""
        self._largest = max(self._largest, elements)
        if self._first_samples is not None:
            self.elements = ceil(elements * self._first_samples / samples) if self._first_samples < samples else None
            self._first_samples = None
        if self.elements is None or samples <= 1:
            return samples
        limit = max(1, self.min_samples, self.elements * samples // max(1, elements))
        return ceil(samples / ceil(samples / min(samples, limit)))

    def halve(self, samples: int, elements: int) -> int:
        """Lower the limit to half a chunk that was too large; returns the samples in that half."""
        half = max(self.min_samples, samples // 2)
        self.elements = ceil(elements * half / samples)
        self._quiet_steps = 0
        self._patience *= 2
        return half

    def adopt(self, elements: int | None) -> None:
        """Take over the limit of another process, or of a checkpoint, where it is smaller."""
        if elements is not None and (self.elements is None or elements < self.elements):
            self.elements = elements
            self._quiet_steps = 0

    def count_quiet_step(self, plenty: bool) -> bool:
        """Count an optimizer step without trouble; True where the limit grew.

        Args:
            plenty: twice the activations would leave memory free.
        """
        if self.elements is None:
            return False
        self._quiet_steps = self._quiet_steps + 1 if plenty else 0
        if self._quiet_steps < self._patience:
            return False
        self._quiet_steps = 0
        self.elements *= 2
        if self.elements >= self._largest:
            self.elements = None
        return True


class Pressure:
    """The memory pressure of a step.

    Attributes:
        reader: reads the device's memory.
    """

    def __init__(self, trainer: "MemoryTrainer", reader) -> None:
        self.reader = reader
        self._trainer = trainer
        self._near_peak = 0  # bytes allocated between forward and backward, at most in this window
        self._resting = 0  # bytes allocated between two steps
        self._largest: int | None = None  # tensor elements of the largest micro-batch that ran

    def note_activations(self) -> None:
        """Read memory between forward and backward, when all activations of a chunk are held."""
        self._near_peak = max(self._near_peak, self.reader.allocated())

    def after_window(self, window) -> None:
        """Pass a finished window's figures to the memory callback, and change the chunk size where that is due."""
        callback = self._trainer._callback
        if not window.started or callback.monitor is None:
            self._resting = self.reader.allocated()
            return
        near, resting = self._near_peak, self._resting
        largest = max(window.started, key=lambda micro: micro.elements * micro.size // max(1, micro.samples))
        self._largest = max(self._largest or 0, largest.elements)
        callback.elements, callback.near_peak = sum(micro.elements for micro in window.started), near
        # Under sequence parallelism each process has its own tokens of a sequence; under tensor parallelism all have
        # the same.
        processes = self._trainer.args.world_size // self._trainer.get_tp_size()
        callback.tokens += processes * sum(count_tokens(micro.inputs) for micro in window.started)
        self._near_peak, self._resting = 0, self.reader.allocated()
        self._adjust_limit(near, resting, min(largest.size, largest.samples), largest)

    def is_largest(self, shapes: dict[str, list[int]]) -> bool | None:
        """True if a batch has more tensor elements than any that ran; None where none did."""
        return None if self._largest is None else sum(prod(shape) for shape in shapes.values()) > self._largest

    def _adjust_limit(self, near: int, resting: int, samples: int, micro) -> None:
        trainer, runner = self._trainer, self._trainer._runner
        limit, monitor = runner.limit, trainer._callback.monitor
        capacity = trainer._callback.growth.capacity
        status = monitor.status(near / capacity)
        if status == "emergency":
            free_memory()
        helps = runner.splits and samples > limit.min_samples and near - resting > _MIN_SAVING * capacity
        if status in ("critical", "emergency") and helps:
            after = limit.halve(samples, micro.elements * samples // micro.samples)
            trainer._event(
                "micro_batch_lowered",
                status=status,
                utilization=round(near / capacity, 3),
                micro_batch_before=samples,
                micro_batch_after=after,
            )
            trainer._callback.note = f"batch reduced to {after} samples at once"
        elif limit.count_quiet_step(resting + 2 * (near - resting) < monitor.target_utilization * capacity):
            chunk = limit.chunk_size(micro.samples, micro.elements)
            trainer._event("micro_batch_restored", piece_elements=limit.elements, samples_at_once=chunk)
            trainer._callback.note = f"batch restored to {chunk} samples at once"
