"""The part of a micro-batch that runs at once: halved when memory runs out, doubled again after quiet steps."""

from math import ceil


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
