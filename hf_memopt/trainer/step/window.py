"""The part of an optimizer step that has run: its micro-batches and their chunks."""

from dataclasses import dataclass, field
from typing import Any

from hf_memopt.trainer.step.step_state import StepState


@dataclass
class MicroBatch:
    """A micro-batch and which of its samples have run.

    Attributes:
        inputs: the batch as the data loader gave it.
        num_items: the Trainer's num_items_in_batch for the whole window; None where it counts none.
        samples: samples in the batch.
        elements: elements of all its tensors.
        size: most samples in the next chunk.
        synced: its last chunk ends the window, so gradients are reduced over processes.
        number: index in its window.
        versions: `_version` of its tensors, which counts in-place writes.
        chunk_sizes: samples in each chunk that ran, in order; kept when the window restarts, so that dropout draws
            the same masks.
        done: chunks that ran since the last restart.
        loss: sum of the losses of these chunks; None before the first.
        retried_whole: it was retried once without a smaller chunk, since freeing memory may have been enough.
    """

    inputs: Any
    num_items: Any
    samples: int
    elements: int
    size: int
    synced: bool
    number: int
    versions: list[int]
    chunk_sizes: list[int] = field(default_factory=list)
    done: int = 0
    loss: Any = None
    retried_whole: bool = False

    @property
    def position(self) -> int:
        """Number of samples that ran."""
        return sum(self.chunk_sizes[: self.done])

    @property
    def next_chunk(self) -> tuple[int, int]:
        """First sample of the next chunk, and the first behind it."""
        start = self.position
        if self.done < len(self.chunk_sizes):  # repeated after a restart
            return start, start + self.chunk_sizes[self.done]
        return start, min(self.samples, start + self.size)

    def record_chunk(self, start: int, stop: int, loss) -> None:
        """Count a chunk whose backward has finished."""
        if self.done == len(self.chunk_sizes):
            self.chunk_sizes.append(stop - start)
        self.done += 1
        self.loss = loss if self.loss is None else self.loss + loss

    def shrink(self, size: int) -> None:
        """Run the remaining samples in chunks of `size`."""
        self.size = size
        del self.chunk_sizes[self.done :]

    def restart(self) -> None:
        """Run all samples again, in the same chunks."""
        self.done, self.loss = 0, None


@dataclass
class Window:
    """The micro-batches of one optimizer step.

    Attributes:
        state: random generators and logged metrics at its start.
        started: the micro-batches that have begun, the running one last.
        forward_began: the model's forward was called, so DDP has broadcast its buffers.
    """

    state: StepState | None = None
    started: list[MicroBatch] = field(default_factory=list)
    forward_began: bool = False
