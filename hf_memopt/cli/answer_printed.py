"""The answer first: a verdict, memory as a bar, a line a figure and the command, within a terminal of 80 × 24."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from hf_memopt.cli.output import bar
from hf_memopt.cli.speed_printed import AmountOptions, speed_parts
from hf_memopt.units import gib, size

_LINES = 24  # of a terminal that nobody enlarged
_LABEL = 7  # characters before a line's text
_BAR = 30  # characters
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")  # of a shell, with its quotes
_SIZE = re.compile(r"(?<=\d) (?=[KMG]iB)")  # no line ends within one
_HIDDEN = {ord(" "): "\0", ord("\t"): "\1", ord("\n"): "\2"}
_SHOWN = {ord(hidden): chr(blank) for blank, hidden in _HIDDEN.items()}
# Notes that every answer has: in the tables.
_STANDING = ("speed: ", "reserved and device bytes follow", "ordinary segments would reserve")


def width() -> int:
    """Characters in a line; in a pipe 80."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 40), 100)


def paragraph(text: str, label: str = "") -> list[str]:
    """A text in lines that break between words, behind its label."""
    begin = f"{label:<{_LABEL}}" if label else ""
    return _wrapped(text, begin, len(begin))


def one_each(label: str, texts: Iterable[str]) -> list[list[str]]:
    """A paragraph for each text, whose further lines stand deeper; only the first has the label."""
    return [_wrapped(text, f"{'' if index else label:<{_LABEL}}", _LABEL + 2) for index, text in enumerate(texts)]


def _wrapped(text: str, begin: str, indent: int) -> list[str]:
    lines = textwrap.wrap(
        _SIZE.sub("\0", text),
        width(),
        initial_indent=begin,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def memory_bar(estimate) -> list[str]:
    """Predicted bytes of the device's, as a bar, and what they hold at the peak."""
    parts = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    parts.append(("allocator and context", estimate.device_bytes - sum(estimate.breakdown.values())))
    whole = estimate.device_bytes
    named = [f"{kind.replace('_', ' ')} {size(part, whole)}" for kind, part in parts if part > whole / 50]
    lines = paragraph(", ".join(named), f"in {estimate.phase}: ")
    if estimate.capacity_bytes is None:
        return [f"{size(whole)} predicted, of a capacity that is not known", *lines]
    share = whole / estimate.capacity_bytes
    paged = f"{size(estimate.paged_bytes, whole)} of it paged optimizer states, which leave where others need the room"
    lines += paragraph(paged) if estimate.paged_bytes > whole / 50 else []
    drawn = bar(share, min(_BAR, width() - 32))
    return [f"{drawn} {size(whole)} of {size(estimate.capacity_bytes)}, {share:.0%}", *lines]


def speed_lines(estimate, took, amount: AmountOptions, samples: int | None = None) -> list[str]:
    """Speed with its error, and the time and the cost of an amount of training.

    Args:
        samples: of an optimizer step.
    """
    from hf_memopt.estimator.timing.duration import predicted_within, time_text

    if estimate.step_seconds is None:
        reasons = [note.removeprefix("speed: ") for note in estimate.notes if note.startswith("speed: ")]
        return paragraph(f"unknown: {'; '.join(reasons)}", "speed")
    parts = speed_parts(estimate, "a step" if samples is None else f"a step of {samples} samples")
    error = predicted_within(estimate.speed_error, estimate.own_runs).removeprefix("predicted").strip(", ")
    lines = paragraph(f"{', '.join(parts)}, {error}", "speed")
    if took is not None:
        lines += paragraph(f"{time_text(took.seconds)} for {amount.in_words(took)}", "time")
    elif amount.asked:
        lines += paragraph("unknown, as this job's tokens are: say --samples", "time")
    return lines


def host_lines(needed: int, host=None) -> list[str]:
    """Host memory that a process needs and, where it was asked for or assumed, how much there is."""
    if host is None:
        return paragraph(f"{size(needed)} of host memory a process", "host")
    short = "" if needed <= host.bytes else ": too little to load the weights through, where that holds"
    source = f"{host.source}; --host-memory".removeprefix("--host-memory; ")
    there = f"{gib(host.bytes)} {'assumed' if host.assumed else 'there'} ({source}){short}"
    return paragraph(f"{gib(needed)} of host memory a process, of {there}", "host")


def command_lines(command: str, label: str = "run") -> list[str]:
    """A shell command in lines that a shell reads as one; an option and its value stand together."""
    groups: list[list[str]] = []
    for word in _WORD.findall(command):
        if groups and len(groups[-1]) == 1 and not word.startswith("--"):
            groups[-1].append(word)
        else:
            groups.append([word])
    room = width() - _LABEL - 2
    parts = ([" ".join(group)] if len(" ".join(group)) <= room else group for group in groups)
    lines = textwrap.wrap(
        " ".join(part.translate(_HIDDEN) for group in parts for part in group),  # no line ends within quotes
        room,
        break_long_words=False,
        break_on_hyphens=False,
    )
    begins = [f"{label:<{_LABEL}}", *[" " * _LABEL] * len(lines)]
    ends = [*[" \\"] * (len(lines) - 1), ""]
    shown = (line.translate(_SHOWN) for line in lines)
    return [f"{begin}{line}{end}" for begin, line, end in zip(begins, shown, ends, strict=False)]


def note_lines(notes: Iterable[str]) -> list[str]:
    """The notes of this answer; those that every answer has stand beside the tables."""
    return [line for note in notes if not note.startswith(_STANDING) for line in paragraph(note, "note")]


def print_answer(head: Sequence[str], more: Iterable[Sequence[str]], tail: Sequence[str]) -> None:
    """Print the lines of an answer.

    Args:
        more: paragraphs of which as many are printed, each whole, as a small terminal has room for.
    """
    room = _LINES - 1 - len(head) - len(tail)
    shown: list[str] = []
    for lines in more:
        if len(shown) + len(lines) > room:
            break
        shown += lines
    end = "more   --verbose: tables of memory, speed and reasons; --json: all of it"
    print("\n".join([*head, *shown, *tail, end]))
