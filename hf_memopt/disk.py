"""The folder that a run writes to: it can be written to, no other run uses it, and a full disk is named as such."""

import atexit
import contextlib
import errno
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from hf_memopt.errors import InputError

_LOCK = ".lock"
_held: dict[Path, int] = {}  # locked folders of this process, and the open files that hold the locks
# What a disk refuses with, as errno; whatever else an OSError says is not about writing.
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
# Of a file; without one it may be a socket, or a process.
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}
# The same in the words of two libraries whose errors are no OSError: safetensors (Rust), and torch's
# PyTorchStreamWriter, which does not pass the system's reason on.
_SAFETENSORS = re.compile(r"I/O error: (.+?) \(os error \d+\)")
_TORCH = re.compile(r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos")


def write_failure(error: BaseException | None) -> str | None:
    """The reason that a disk did not take a file; None where an error, and its cause, are about something else."""
    while error is not None:
        if reason := _refusal(error):
            return reason
        error = error.__cause__  # not its context: what fails while a refusal is handled is a fault of its own
    return None


def _refusal(error: BaseException) -> str | None:
    if isinstance(error, OSError):
        if error.errno in _REFUSALS or (error.errno in _FORBIDDEN and error.filename):
            return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif type(error).__name__ == "SafetensorError" and (match := _SAFETENSORS.search(str(error))):
        return match[1]
    elif isinstance(error, RuntimeError) and _TORCH.search(str(error)):
        return "the disk did not take all of it (is it full?)"
    return None


def claim(output_dir: str | Path) -> bool:
    """Make a folder this process's own until it ends, however it ends, or until release().

    The system's lock needs no clean-up after a kill, and holds between machines where their shared disk has locks;
    where there are none (Windows, some network disks) nothing is locked.

    Returns:
        Whether it was not this process's own already.

    Raises:
        InputError: it cannot be written to, or another process that is alive uses it.
    """
    if not str(output_dir).strip():
        raise InputError("output_dir is empty: name a folder to write to")
    folder = Path(output_dir).expanduser().resolve()
    if folder in _held:
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"output_dir={output_dir} cannot be written to ({error.strerror}): name another") from error
    try:
        if not _lock(handle):
            owner = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            raise InputError(
                f"output_dir={output_dir} is in use by {owner}: wait until it has ended, or name another folder"
            )
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        os.close(handle)
        raise InputError(f"output_dir={output_dir} cannot be written to ({error.strerror}): name another") from error
    except InputError:
        os.close(handle)
        raise
    if not _held:
        atexit.register(_release_all, os.getpid())
    _held[folder] = handle
    return True


def release(output_dir: str | Path) -> None:
    """Let other processes use a folder that claim() made this one's own."""
    folder = Path(output_dir).expanduser().resolve()
    handle = _held.pop(folder, None)
    if handle is not None:
        with contextlib.suppress(OSError):  # the folder may be gone
            (folder / _LOCK).unlink()
        os.close(handle)


def check_writable(output_dir: str | Path) -> None:
    """Raise where claim() would; nothing that was not there before is left.

    Raises:
        InputError: the folder cannot be written to, or another process that is alive uses it.
    """
    folder = Path(output_dir).expanduser().resolve()
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    with claimed(output_dir):
        pass
    for place in new:
        with contextlib.suppress(OSError):  # another run has begun to write there
            place.rmdir()


@contextlib.contextmanager
def claimed(output_dir: str | Path) -> Iterator[None]:
    """claim() for a while."""
    new = claim(output_dir)
    try:
        yield
    finally:
        if new:
            release(output_dir)


def _release_all(process: int) -> None:
    if os.getpid() == process:  # not in a copy that was forked from it
        for folder in list(_held):
            release(folder)


def _lock(handle: int) -> bool:
    """True if this process has the lock now, or nobody can."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by data loading workers, unlike flock
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
