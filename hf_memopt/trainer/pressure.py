"""Chunks made smaller before memory runs out, and larger again after a quiet time."""

import math

from hf_memopt.oom.classify import free_memory
from hf_memopt.trainer.split import count_tokens

_MOVES = 0.02  # of the capacity: what smaller chunks must be able to save


class Pressure:
    """How near a trainer's steps come to the device's capacity.

    Attributes:
        reader: of the device's memory.
    """

    def __init__(self, trainer, reader) -> None:
        self.reader = reader
        self._trainer = trainer
        self._near_peak = self._resting = 0  # bytes
        self._largest: int | None = None  # tensor elements of the largest micro-batch that ran

    def activations_are_there(self) -> None:
        """Between forward and backward: all of a chunk's activations are held."""
        self._near_peak = max(self._near_peak, self.reader.allocated())

    def after_window(self, window) -> None:
        """Hand the window's figures to the memory callback, and change the size of chunks where that is due."""
        callback = self._trainer._callback
        if not window.started or callback.monitor is None:
            self._resting = self.reader.allocated()
            return
        near, resting = self._near_peak, self._resting
        largest = max(window.started, key=lambda micro: micro.elements * micro.size // max(1, micro.samples))
        self._largest = max(self._largest or 0, largest.elements)
        callback.elements, callback.near_peak = sum(micro.elements for micro in window.started), near
        # Of a sequence that processes share, each has its own tokens.
        processes = self._trainer.args.world_size // self._trainer.get_tp_size()
        callback.tokens += processes * sum(count_tokens(micro.inputs) for micro in window.started)
        self._near_peak, self._resting = 0, self.reader.allocated()
        self._act(near, resting, min(largest.size, largest.samples), largest)

    def is_largest(self, shapes: dict[str, list[int]]) -> bool | None:
        """Whether a batch has more tensor elements than all that ran; None where none did."""
        return None if self._largest is None else sum(math.prod(shape) for shape in shapes.values()) > self._largest

    def _act(self, near: int, resting: int, samples: int, micro) -> None:
        trainer, runner = self._trainer, self._trainer._runner
        limit, monitor = runner.limit, trainer._callback.monitor
        capacity = trainer._callback.growth.capacity
        status = monitor.status(near / capacity)
        if status == "emergency":
            free_memory()
        helps = runner.splits and samples > limit.fewest_rows and near - resting > _MOVES * capacity
        if status in ("critical", "emergency") and helps:
            after = limit.lower(samples, micro.elements * samples // micro.samples)
            trainer._event(
                "micro_batch_lowered",
                status=status,
                utilization=round(near / capacity, 3),
                micro_batch_before=samples,
                micro_batch_after=after,
            )
            trainer._callback.note = f"batch reduced to {after} samples at once"
        elif limit.quiet_step(resting + 2 * (near - resting) < monitor.target_utilization * capacity):
            rows = limit.rows_at_once(micro.samples, micro.elements)
            trainer._event("micro_batch_restored", piece_elements=limit.elements, samples_at_once=rows)
            trainer._callback.note = f"batch restored to {rows} samples at once"
