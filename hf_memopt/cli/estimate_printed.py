"""What `hf-memopt estimate` and `dry-run` print: the answer, or with --verbose its tables."""

from dataclasses import dataclass
from typing import Any

from hf_memopt.cli.answer_printed import (
    host_lines,
    memory_bar,
    note_lines,
    one_each,
    paragraph,
    print_answer,
    speed_lines,
)
from hf_memopt.cli.output import print_table
from hf_memopt.cli.speed_printed import AmountOptions, print_speed
from hf_memopt.terminal import say
from hf_memopt.units import size

_VERDICTS = {True: "YES, it fits", False: "NO, it does not fit", None: "UNKNOWN, no capacity"}


@dataclass(frozen=True, kw_only=True)
class EstimatedJob:
    """An estimate, and what its user asked.

    Attributes:
        title: the job in words.
        settings: where its settings come from, in words; None of a script, which has its own.
        savings: changes that save memory (estimator.suggestions.Saving).
        took: the Duration of the amount that was asked for.
    """

    title: str
    settings: str | None
    estimate: Any
    savings: list
    took: Any
    amount: AmountOptions

    def print(self, verbose: bool) -> None:
        """Print the tables, or the answer alone."""
        self._print_tables() if verbose else self._print_answer()

    def _print_answer(self) -> None:
        """Print a verdict, the figures in a line each, and what would save memory."""
        estimate = self.estimate
        origin = f"{self.settings}: " if self.settings else ""
        head = [
            *paragraph(f"{_VERDICTS[estimate.fits]}: {self.title}"),
            *memory_bar(estimate),
            *paragraph(f"{origin}{estimate.estimated}", "with"),
            *speed_lines(estimate, self.took, self.amount),
            *host_lines(estimate.host_bytes),
        ]
        then = {True: ", and then it fits"} if not estimate.fits else {}
        lines = [f"{one.change}: {size(one.saved_bytes)} less{then.get(one.fits, '')}" for one in self.savings]
        print_answer(head, one_each("change", lines), [*self._no_way(), *note_lines(estimate.notes)])

    def _print_tables(self) -> None:
        """Print all of it."""
        from hf_memopt.estimator.accounting.ledger import ROLLOUT_PHASES

        estimate, whole = self.estimate, self.estimate.device_bytes
        say(f"{_VERDICTS[estimate.fits]}: {self.title}")
        say(f"{size(whole)} of {size(estimate.capacity_bytes)} predicted")
        say(f"estimated: {estimate.estimated}" + (f" ({self.settings})" if self.settings else ""))
        print_speed(estimate, self.took, self.amount)
        if any(phase in estimate.phases for phase in ROLLOUT_PHASES):
            rows = [(phase.replace("_", " "), size(peak, whole)) for phase, peak in estimate.phases.items() if peak]
            print_table("phases, one after the other", ("phase", "peak"), rows)
        rows = [(kind.replace("_", " "), size(part, whole)) for kind, part in estimate.breakdown.items() if part]
        print_table(f"at the peak, in {estimate.phase}", ("memory", "predicted"), rows)
        print_table("in total", ("memory", "predicted"), self._totals())
        if self.savings:
            fits = {True: "yes", False: "no", None: ""}
            rows = [(saving.change, size(saving.saved_bytes), fits[saving.fits]) for saving in self.savings]
            print_table("changes that save most", ("change", "predicted saving", "then fits"), rows)
        print("".join(f"{line}\n" for line in self._no_way()), end="")
        for note in estimate.notes:
            say(f"note: {note}")

    def _no_way(self) -> list[str]:
        """A line where nothing that was tried fits."""
        if self.estimate.fits is not False or any(saving.fits for saving in self.savings):
            return []
        return paragraph("no change fits: try `hf-memopt plan`, for other models and more devices")

    def _totals(self) -> list[tuple[str, str]]:
        """The totals, equal ones in one row: a CPU has no caching allocator and no context of its own."""
        names: dict[int, list[str]] = {}
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes"):
            names.setdefault(getattr(self.estimate, name), []).append(name.removesuffix("_bytes").replace("_", " "))
        return [(" = ".join(labels), size(value, self.estimate.device_bytes)) for value, labels in names.items()]
