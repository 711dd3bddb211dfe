"""One kind of error for bad input: a sentence that names the field, the value and the fix."""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hf_memopt.other_names import meant_by, plain_word, understood
from hf_memopt.redaction import redact_argv, redact_text
from hf_memopt.terminal import plain

_LONGEST = 200  # characters of a value in a message
_SHORT = reprlib.Repr()  # a few lines of YAML can stand for billions of items, which repr() would all write
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _LONGEST


EXIT_OUT_OF_MEMORY = 75  # EX_TEMPFAIL of sysexits.h: the run may be started again


class InputError(ValueError):
    """Something the user gave cannot be used. The message is one sentence that says what to do instead."""


class MethodRefused(InputError):
    """A model does not train with a method (full, lora, qlora); with another it may."""


class IncompatibleLibrary(RuntimeError):
    """An installed library does not fit hf_memopt: most likely a release that was not tried. No setting is at fault.

    Programs that run() starts end with exit code 2, without a traceback.
    """


class ImpossibleEstimate(RuntimeError):
    """Numbers of an estimate contradict each other, or its model: a fault of this package, which gives none of them.

    Programs that run() starts end with exit code 2, without a traceback.
    """


class TrainingOutOfMemory(RuntimeError):
    """Training cannot continue: not even one sample fits, or processes that wait for each other cannot recover.

    Programs that run() starts end with exit code 75 (`exit_code`), without a traceback.

    Attributes:
        report: what is written to oom_report.json.
    """

    exit_code = EXIT_OUT_OF_MEMORY

    def __init__(self, message: str, report: dict | None = None) -> None:
        super().__init__(message)
        self.report = report or {}


class Terminated(SystemExit):
    """SIGTERM stopped the program at a point that it chose; its text says where."""


class StartAgain(Exception):
    """A recipe is to begin anew with other arguments.

    Attributes:
        argv: the command line without the program's name.
        free: gives back the memory of what was begun.
    """

    def __init__(self, argv: list[str], free: Callable[[], None]) -> None:
        super().__init__(f"begin again with {' '.join(redact_argv(argv))}")
        self.argv, self.free = argv, free


def choose(kind: str, name: str, names: Iterable[str]) -> InputError:
    """The error for an unknown name: first the one that is meant or closest, then all of them.

    Args:
        kind: what the name stands for, e.g. "preset".
        name: what was given.
        names: the accepted names.
    """
    names = sorted(names)
    close = meant_by(kind, name, names) or closest(name, names)
    hint = f" Did you mean {repr(close) if close in names else close}?" if close else ""
    listed = "" if len(names) > 40 else f" Known: {', '.join(names)}."
    return InputError(f"unknown {kind} {brief(name)}.{hint}{listed}")


def respell(kind: str, name: str, names: Iterable[str]) -> str:
    """The accepted name that a word stands for: in any case, with any separators, or another name of the same thing.
    A word that stands for none stays as it is."""
    names = list(names)
    if name in names or not isinstance(name, str):
        return name
    same = [known for known in names if plain_word(known) == plain_word(name)]
    meaning = same[0] if len(same) == 1 else understood(kind, name)
    return meaning if meaning in names else name


def accepted(kind: str, name: str, names: Iterable[str]) -> str:
    """The accepted name that a word stands for, as respell() finds it.

    Raises:
        InputError: it stands for none; with the names that there are.
    """
    names = list(names)
    if (found := respell(kind, name, names)) not in names:
        raise choose(kind, name, names)
    return found


def closest(name: str, known: Iterable[str], cutoff: float | None = None) -> str | None:
    """The known name that is most like another one; None if none is like it.

    Args:
        cutoff: how much alike they have to be, from 0 to 1; by default less for short names.
    """
    known, word = list(known), plain_word(str(name)[:_LONGEST])
    if same := next((other for other in known if word and plain_word(other) == word), None):
        return same
    cutoff = cutoff or (0.6 if len(word) > 3 else 0.5)
    lowered = {other.lower(): other for other in reversed(known)}
    close = difflib.get_close_matches(str(name)[:_LONGEST].lower(), lowered, n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def listed(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def misspelling(name: str, known: Iterable[str]) -> str | None:
    """The known name that another is a misspelling of, word by word; None if there is none.

    closest() takes `max_in_nvme` for `max_in_cpu`, which is as long and means something else.
    """
    name = str(name)[:_LONGEST]
    for close in difflib.get_close_matches(name, known, n=5, cutoff=0.6):
        if close.replace("_", "").lower() == name.replace("_", "").lower():
            return close
        pairs = list(zip(name.split("_"), close.split("_"), strict=False))
        same_words = name.count("_") == close.count("_")
        if same_words and all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.7 for pair in pairs):
            return close
    return None


def brief(value: object) -> str:
    """A value as Python writes it, on one line and cut where it is long; of nested ones, the outer levels."""
    text = " ".join(_SHORT.repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


@contextmanager
def as_input_error(what: str, *kinds: type[Exception]):
    """Re-raise library errors of the given kinds as an InputError that begins with `what`."""
    try:
        yield
    except (InputError, IncompatibleLibrary):
        raise
    except kinds as error:
        reason = one_line(error)  # transformers lists hundreds of model types
        raise InputError(
            f"{what}: {reason if len(reason) <= 2 * _LONGEST else f'{reason[: 2 * _LONGEST]} …'}"
        ) from error


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, then its causes; where there is no cause, what was being handled when it was raised."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from chain(part)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def one_line(error: BaseException) -> str:
    """The error's text on one line, without secrets and control characters; its class where it has no text."""
    return redact_text(plain(" ".join(str(error).split()))) or type(error).__name__
