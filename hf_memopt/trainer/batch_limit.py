"""How much of a micro-batch runs at once: what was learned from running out, and when to try more again."""

from math import ceil


class BatchLimit:
    """The largest piece that is run, in tensor elements, so that a batch of short samples stays whole where one of
    long samples is cut.

    A limit is halved when memory runs out (or comes near to it) and doubled after a quiet time; each further failure
    doubles the quiet time that the next growth waits for, so that sizes do not oscillate.
    """

    def __init__(self, patience: int, fewest_rows: int = 1, first_rows: int | None = None) -> None:
        """Args:
        patience: optimizer steps without trouble before the limit grows, at first.
        fewest_rows: samples a piece has at least.
        first_rows: samples that a piece of the first batch has at most; by default all of it.
        """
        self.elements: int | None = None
        self._first_rows = first_rows
        self.fewest_rows = fewest_rows
        self._patience = patience
        self._quiet = 0
        self._largest = 0

    def rows_at_once(self, rows: int, elements: int) -> int:
        """Samples in each piece of a batch of `rows` samples and `elements` tensor elements, evenly shared."""
        self._largest = max(self._largest, elements)
        if self._first_rows is not None:
            self.elements = ceil(elements * self._first_rows / rows) if self._first_rows < rows else None
            self._first_rows = None
        if self.elements is None or rows <= 1:
            return rows
        most = max(1, self.fewest_rows, self.elements * rows // max(1, elements))
        return ceil(rows / ceil(rows / min(rows, most)))

    def lower(self, rows: int, elements: int) -> int:
        """Halve a piece of `rows` samples and `elements` elements, which was too much; returns the samples left."""
        half = max(self.fewest_rows, rows // 2)
        self.elements = ceil(elements * half / rows)
        self._quiet = 0
        self._patience *= 2
        return half

    def agree(self, elements: int | None) -> None:
        """Take over another process's smaller limit."""
        if elements is not None and (self.elements is None or elements < self.elements):
            self.elements = elements
            self._quiet = 0

    def quiet_step(self, plenty: bool) -> bool:
        """Count an optimizer step without trouble; True where the limit grew.

        Args:
            plenty: twice the activations would leave memory free.
        """
        if self.elements is None:
            return False
        self._quiet = self._quiet + 1 if plenty else 0
        if self._quiet < self._patience:
            return False
        self._quiet = 0
        self.elements *= 2
        if self.elements >= self._largest:
            self.elements = None
        return True
