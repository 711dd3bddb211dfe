"""Run a function in a child process: what it imports, prints, or changes of its environment leaves this one alone."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from hf_memopt.errors import IncompatibleLibrary, one_line

_LONGEST = 120.0  # seconds: torch and DeepSpeed are imported in about five


def in_child(function: Callable, *args: Any) -> Any:
    """What a function of a module returns, called in a child process that prints nothing.

    Raises:
        IncompatibleLibrary: it raised, ended without an answer, or gave none in two minutes.
    """
    # A fork has everything that is imported here already; elsewhere than on Linux it is not safe (bpo-33725).
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(_LONGEST) else "no answer in two minutes"
    except EOFError:
        answer = "the check ended without an answer"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, str):
        raise IncompatibleLibrary(f"{function.__module__} failed in its child process: {answer}")
    return answer[0]


def _answer(sender: Any, function: Callable, args: tuple) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = os.fdopen(nowhere, "w")
    try:
        sender.send((function(*args),))
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {one_line(error)}")
    os._exit(0)  # torch and DeepSpeed leave threads and process groups to the interpreter's end
