"""One kind of error for bad input: a sentence that names the field, the value and the fix."""

import atexit
import difflib
import os
import reprlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hf_memopt.noise import quiet
from hf_memopt.redaction import redact_argv, redact_text
from hf_memopt.terminal import plain

_LONGEST = 200  # characters of a value in a message
_SHORT = reprlib.Repr()  # a few lines of YAML can stand for billions of items, which repr() would all write
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _LONGEST

_TURN = 5.0  # seconds; more than the launcher takes to notice that the first process ended


EXIT_OUT_OF_MEMORY = 75  # EX_TEMPFAIL of sysexits.h: the run may be started again


class InputError(ValueError):
    """Something the user gave cannot be used. The message is one sentence that says what to do instead."""


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


def choose(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for an unknown name: the closest known one first, then all of them.

    Args:
        kind: what the name stands for, e.g. "preset".
        name: what was given.
        known: the accepted names.
    """
    known = sorted(known)
    close = difflib.get_close_matches(str(name)[:_LONGEST], known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    listed = "" if len(known) > 40 else f" Known: {', '.join(known)}."
    return InputError(f"unknown {kind} {brief(name)}.{hint}{listed}")


def brief(value: object) -> str:
    """A value as Python writes it, on one line and cut where it is long; of nested ones, the outer levels."""
    text = " ".join(_SHORT.repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


@contextmanager
def as_input_error(what: str, *kinds: type[Exception]):
    """Re-raise library errors of the given kinds as an InputError that begins with `what`."""
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"{what}: {one_line(error)}") from error


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


def run(main: Callable[..., object]) -> None:
    """Run a program's main function; an InputError becomes one line on stderr and exit code 2, Ctrl-C one and 130,
    training that SIGTERM stopped one and 143.

    Several processes usually meet the same input. The first one speaks at once and ends, upon which the launcher ends
    the others; one of those that lives on is alone with its error, and speaks then.
    """
    quiet()
    try:
        _until_it_stands(main)
    except InputError as error:
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(_TURN)
        print(f"error: {_sentence(error)}", file=sys.stderr, flush=True)
        _end(2)
    except TrainingOutOfMemory as end:  # which has been logged
        _end(end.exit_code)
    except Exception as error:
        from hf_memopt.disk import write_failure

        if (reason := write_failure(error)) is None:
            raise
        print(f"error: {reason}", file=sys.stderr, flush=True)
        _end(2)
    except (KeyboardInterrupt, Terminated) as stop:
        if int(os.environ.get("RANK", "0")) == 0:  # all processes stop for the same reason
            print(str(stop) or "stopped", file=sys.stderr, flush=True)
        _end(130 if isinstance(stop, KeyboardInterrupt) else stop.code)
    if "RANK" in os.environ:
        atexit._run_exitfuncs()  # trackers send what they have
        _leave(0)


def _end(code: int) -> None:
    """End the program. A process group that is still open would wait for its peers at interpreter exit."""
    _leave(code) if "RANK" in os.environ else sys.exit(code)


def _until_it_stands(main: Callable[..., object]) -> None:
    """Run a program, and again with other arguments where it asks for that; what it held before is let go."""
    again_with: list[list[str]] = []
    while True:
        try:
            main(*again_with)
            return
        except StartAgain as again:
            again_with, free = [again.argv], again.free
            traceback.clear_frames(again.__traceback__)
        free()


def _sentence(error: InputError) -> str:
    """The message alone, where a data loader's worker has put a traceback before it."""
    text = str(error)
    if "Original Traceback" in text:
        text = text.strip().rpartition(f"{type(error).__name__}: ")[2]
    return one_line(InputError(text))


def _leave(code: int) -> None:
    """End a process of several without taking the interpreter down.

    A thread that comes back from torch's C++ side after the interpreter's end aborts the process, all done as it is:
    seen in one of some hundred launches on CPUs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
