"""Run a function in a child process that can change nothing outside a temporary folder, and that dies with its parent.

    this process ─ supervisor ─ the function, confined, with all that it starts, in a session of its own

The supervisor kills the session when the function has ended, or when this process is gone: then it removes the folder.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

from hf_memopt.confined.rights import confine, die_with
from hf_memopt.errors import one_line

_INTERVAL = 0.05  # seconds between two looks at the child


def run_confined(
    function: Callable[[Connection], int],
    serve: Callable[[Connection, str], None],
    finish: Callable[[str], None] = lambda folder: None,
) -> int:
    """Run a function in a confined child; its exit code, 128 + N where signal N ended it, 2 where it was not confined.

    Everything that the function starts ends with it. Its temporary folder is the only place where it can write.

    Args:
        function: gets one end of a connection to `serve`, which runs here until the child ends.
        finish: gets the temporary folder as the child has left it, before it is removed.
    """
    folder = os.path.realpath(tempfile.mkdtemp(prefix="hf-memopt-"))
    sys.stdout.flush()
    sys.stderr.flush()
    parent_end, child_end = Pipe()
    lifeline, alive = os.pipe()  # `alive` is closed when this process ends, in whatever way
    supervisor = os.fork()
    if supervisor == 0:
        try:
            parent_end.close()
            os.close(alive)
            _supervise(function, child_end, lifeline, folder)
        finally:
            os._exit(2)
    os.close(lifeline)
    child_end.close()
    try:
        serve(parent_end, folder)
        code = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
        finish(folder)
    finally:
        os.close(alive)
        parent_end.close()
        # Not a TemporaryDirectory, whose cleanup changes the modes of what a link in it names (CVE-2023-6597).
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _supervise(function: Callable[[Connection], int], connection: Connection, lifeline: int, folder: str) -> None:
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            die_with(parent)
            _be_child(function, connection, folder)
        finally:
            os._exit(2)
    connection.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the parent, whose end says it
    ended = status = orphaned = 0
    while not ended and not orphaned:
        orphaned = bool(select.select([lifeline], [], [], _INTERVAL)[0])
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)  # which may not lead its group yet
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    if orphaned:
        shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _be_child(function: Callable[[Connection], int], connection: Connection, folder: str) -> None:
    os.setsid()
    _leave_open(connection.fileno())
    os.mkdir(os.path.join(folder, "tmp"))
    os.environ["TMPDIR"] = tempfile.tempdir = os.path.join(folder, "tmp")
    try:
        reason = confine(folder)
    except OSError as error:
        reason = one_line(error)
    if reason:
        print(f"error: this system refuses to confine a process: {reason}", file=sys.stderr, flush=True)
        return
    code = 2
    try:
        code = function(connection)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without what was registered for the end of the process, and without waiting for its threads


def _leave_open(needed: int) -> None:
    """Leave a process nothing to write into but one descriptor, stdout and stderr; and a terminal to read from.

    Descriptors are replaced, not closed: their numbers stay in use for those objects of Python that would close them.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2 and descriptor not in (needed, null):
            with contextlib.suppress(OSError):  # that of listdir()
                os.dup2(null, descriptor, inheritable=False)
    if not os.isatty(0):
        os.dup2(null, 0)
