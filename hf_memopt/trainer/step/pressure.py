"""Chunks halved when memory is nearly full, before it runs out, and doubled again after quiet steps."""

import math

from hf_memopt.oom.classify import free_memory
from hf_memopt.trainer.step.split import count_tokens

_MIN_SAVING = 0.02  # of the capacity: activations must be at least this much for smaller chunks to help


class Pressure:
    """The memory pressure of a step.

    Attributes:
        reader: reads the device's memory.
    """

    def __init__(self, trainer, reader) -> None:
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
        self._act(near, resting, min(largest.size, largest.samples), largest)

    def is_largest(self, shapes: dict[str, list[int]]) -> bool | None:
        """True if a batch has more tensor elements than any that ran; None where none did."""
        return None if self._largest is None else sum(math.prod(shape) for shape in shapes.values()) > self._largest

    def _act(self, near: int, resting: int, samples: int, micro) -> None:
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
