"""Ends of recipes and commands: errors in one line, exit codes, processes of a launcher."""

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable

from hf_memopt.disk import write_failure
from hf_memopt.errors import (
    ImpossibleEstimate,
    IncompatibleLibrary,
    InputError,
    StartAgain,
    Terminated,
    TrainingOutOfMemory,
    chain,
    one_line,
)
from hf_memopt.files import write_json
from hf_memopt.noise import quiet
from hf_memopt.terminal import only_plain_text, say

_TURN = 5.0  # seconds; more than the launcher takes to notice that the first process ended


def run(main: Callable[..., object]) -> None:
    """Run a program's main function; an InputError becomes one line on stderr and exit code 2, Ctrl-C one and 130,
    training that SIGTERM stopped one and 143.

    Several processes usually meet the same input. The first one prints its error at once and ends, upon which the
    launcher ends the others; one that survives this has an error of its own, and prints it then.
    """
    quiet()
    try:
        with only_plain_text(stderr=False):
            _until_it_stands(main)
    except (InputError, IncompatibleLibrary, ImpossibleEstimate) as error:
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(_TURN)
        _refuse(_sentence(error))
    except TrainingOutOfMemory as end:  # which has been logged
        _end(end.exit_code)
    except Exception as error:
        if (reason := write_failure(error) or _torchvision_mismatch(error)) is None:
            raise
        _refuse(reason)
    except (KeyboardInterrupt, Terminated) as stop:
        if int(os.environ.get("RANK", "0")) == 0:  # all processes stop for the same reason
            print(str(stop) or "stopped", file=sys.stderr, flush=True)
        _end(130 if isinstance(stop, KeyboardInterrupt) else stop.code)
    if "RANK" in os.environ:
        atexit._run_exitfuncs()  # trackers send what they have
        _leave(0)


def _refuse(reason: str) -> None:
    """Say why nothing is done, and end."""
    say(f"error: {reason}", sys.stderr)
    # torchrun prints a table of failures last, with what a process leaves in this file: torch 2.13,
    # distributed.elastic.multiprocessing.errors.ProcessFailure. accelerate's traceback of one process takes nothing.
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure = {"message": f"error: {reason}", "extraInfo": {"timestamp": str(int(time.time()))}}
        write_json(file, {"message": failure})
    _end(2)


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


def _torchvision_mismatch(error: Exception) -> str | None:
    """transformers imports torchvision wherever it is installed; a wheel for another torch build fails there."""
    if not any("operator torchvision::" in str(cause) for cause in chain(error)):
        return None
    return (
        "the installed torchvision does not fit the installed torch, and transformers cannot be imported with it: "
        "install torchvision from the index that torch came from, or run pip uninstall torchvision"
    )


def _sentence(error: InputError | IncompatibleLibrary) -> str:
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
