"""Files that a script writes, kept apart: it sees them as written, and afterwards they are gone.

A copy-on-write layer over Python's own file functions. What a script creates or changes lies in a temporary folder,
under the same path; what it removes is only hidden from it. Where transformers, datasets and torch write without
Python, they are given the temporary folder's paths (scratch_libraries). What reaches a file past these functions, or
starts a program, raises an audit event before it happens, and is refused.
"""

import builtins
import bz2
import contextlib
import errno
import functools
import io
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LARGEST_COPY = 2**30  # bytes of a file that is changed in place
# The built-in open(), and where the standard library has imported it under a name of its own.
_OPENERS = ((builtins, "open"), (io, "open"), (bz2, "_builtin_open"), (tarfile, "bltn_open"))
_READERS = ("stat", "lstat", "access", "readlink", "statvfs", "listxattr", "getxattr", "chdir")
_CHANGERS = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "mkfifo")
# Audit events (docs.python.org/3/library/audit_events.html): how many of their first arguments are paths that change.
_CHANGES = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
    "sqlite3.connect": 1,
}
_PROGRAMS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile")
_lstat, _listdir, _scandir, _rename = os.lstat, os.listdir, os.scandir, os.rename
_active: list["Scratch"] = []  # an audit hook stays for good; it asks this list


@contextlib.contextmanager
def scratch_files(*kept: str) -> Iterator["Scratch"]:
    """Keep apart what is written while the context lasts.

    Args:
        kept: folders where writing is real.
    """
    cwd = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="hf-memopt-", ignore_cleanup_errors=True) as folder:
        folder = os.path.realpath(folder)
        os.makedirs(os.path.join(folder, "tmp"))
        scratch = Scratch(folder, kept)
        with contextlib.ExitStack() as stack:
            stack.callback(os.chdir, cwd)
            for owner, name, function in _functions(scratch):
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, function))
            stack.enter_context(mock.patch.object(tempfile, "tempdir", os.path.join(folder, "tmp")))
            stack.enter_context(mock.patch.object(sys, "dont_write_bytecode", True))
            _refuse_others()
            _active.append(scratch)
            stack.callback(_active.pop)
            yield scratch


class Scratch:
    """What a script has written and removed.

    Attributes:
        folder: holds what it has written.
    """

    def __init__(self, folder: str, kept: tuple[str, ...] = ()):
        self.folder = folder
        kept = (folder, *kept, "/dev", "/proc")
        self._kept = {whole(path) for path in kept for whole in (os.path.abspath, os.path.realpath)}
        self._removed: set[str] = set()

    def is_real(self, path) -> bool:
        """Whether a path, or a file descriptor, is written to as it is."""
        whole = _whole(path)
        return whole is None or any(whole == kept or whole.startswith(kept + os.sep) for kept in self._kept)

    def read(self, path):
        """The path to read from: the copy where there is one, or where the original counts as removed."""
        if self.is_real(path):
            return path
        copy = self._copy(_whole(path))
        return copy if _exists(copy) or self._is_removed(_whole(path)) else path

    def write(self, path, content: bool = True):
        """The path to write to.

        Args:
            content: the original's is kept, for files that are changed in place.

        Raises:
            FileNotFoundError: there is no such folder.
            PermissionError: the original is too large to copy.
        """
        if self.is_real(path):
            return path
        whole = _whole(path)
        copy = self._copy(whole)
        if not os.path.isdir(os.path.dirname(whole)):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        if content and not _exists(copy) and os.path.isfile(path):
            if os.path.getsize(path) > _LARGEST_COPY:
                raise PermissionError(errno.EPERM, "a dry run writes nothing, and cannot copy this large file", path)
            shutil.copy(path, copy)
        return copy

    def remove(self, path) -> None:
        """Hide a path and everything under it; what the script wrote there is removed."""
        copy = self._copy(_whole(path))
        if os.path.isdir(copy) and not os.path.islink(copy):
            shutil.rmtree(copy)
        elif _exists(copy):
            os.unlink(copy)
        self._removed.add(_whole(path))

    def rename(self, source, target) -> None:
        """Move a file, or a folder that the script created."""
        if os.path.isdir(source):
            if not self.is_real(source) and not self._is_removed(_whole(source)) and _exists(_whole(source)):
                raise PermissionError(errno.EPERM, "a dry run moves no folder that it did not create", str(source))
            _rename(self.read(source), self.write(target, content=False))
        else:
            shutil.copyfile(source, target)
        os.unlink(source) if os.path.isfile(source) else self._removed.add(_whole(source))

    def differs(self, path) -> bool:
        """Whether a folder's content is not the original's alone."""
        if self.is_real(path):
            return False
        whole = _whole(path)
        return _exists(self._copy(whole)) or any(removed.startswith(whole) for removed in self._removed)

    def entries(self, path) -> list[os.DirEntry]:
        """A folder's content: the copies, and the original's that are neither copied nor removed."""
        copy, whole = self._copy(_whole(path)), _whole(path)
        written = list(_scandir(copy)) if os.path.isdir(copy) else []
        if self._is_removed(whole) or not _exists(whole):
            return written
        names = {entry.name for entry in written}
        hidden = {os.path.basename(path) for path in self._removed if os.path.dirname(path) == whole}
        return written + [entry for entry in _scandir(whole) if entry.name not in names | hidden]

    def _copy(self, whole: str) -> str:
        return f"{self.folder}/files{whole}"

    def _is_removed(self, whole: str) -> bool:
        return any(str(part) in self._removed for part in (whole, *Path(whole).parents))


def _whole(path) -> str | None:
    """An absolute path, for None that of the current folder; None for a file descriptor."""
    return None if isinstance(path, int) else os.path.abspath(os.fsdecode("." if path is None else path))


def _exists(path: str) -> bool:
    """Whether there is something at a path itself, whatever the script sees there."""
    try:
        _lstat(path)
    except OSError:
        return False
    return True


class _Entries(contextlib.AbstractContextManager):
    """os.scandir()'s iterator over entries that are known."""

    def __init__(self, entries):
        self._entries = iter(entries)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._entries)

    def __exit__(self, *error):
        self.close()

    def close(self):
        self._entries = iter(())


def _functions(scratch: Scratch) -> Iterator[tuple[object, str, object]]:
    """Owner, name and replacement of every function that takes a path."""
    for name in _READERS:
        yield os, name, _with_path(getattr(os, name, None), scratch.read)
    for name in _CHANGERS:
        yield os, name, _with_path(getattr(os, name, None), scratch.write)
    for owner, name in _OPENERS:
        yield owner, name, _opening(scratch, io.open)
    yield os, "open", _opening_descriptor(scratch, os.open)
    yield from _removing(scratch)
    yield from _creating(scratch)
    yield from _listing(scratch)
    yield os, "system", lambda command: 127 << 8  # the exit status of a command that a shell does not know


def _with_path(function, where):
    """A function whose first argument, a path, is replaced."""

    @functools.wraps(function or len)
    def call(path, *args, **kwargs):
        return function(path if kwargs.get("dir_fd") is not None else where(path), *args, **kwargs)

    return call


def _opening(scratch: Scratch, function):
    @functools.wraps(function)
    def call(file, mode="r", *args, **kwargs):
        if not set(mode) & set("wax+"):
            return function(scratch.read(file), mode, *args, **kwargs)
        if "x" in mode:
            _refuse_existing(file)
        return function(scratch.write(file, content=not set(mode) & set("wx")), mode, *args, **kwargs)

    return call


def _opening_descriptor(scratch: Scratch, function):
    @functools.wraps(function)
    def call(path, flags, *args, **kwargs):
        if kwargs.get("dir_fd") is not None:
            return function(path, flags, *args, **kwargs)
        if not flags & _WRITING:
            return function(scratch.read(path), flags, *args, **kwargs)
        if flags & os.O_EXCL:
            _refuse_existing(path)
        return function(scratch.write(path, content=not flags & os.O_TRUNC), flags, *args, **kwargs)

    return call


def _refuse_existing(path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "File exists", str(path))


def _removing(scratch: Scratch) -> Iterator[tuple[object, str, object]]:
    unlink, rmdir, rmtree = os.unlink, os.rmdir, shutil.rmtree

    def remove_file(path, *, dir_fd=None):
        if dir_fd is not None or scratch.is_real(path):
            return unlink(path, dir_fd=dir_fd)
        os.lstat(path)  # raises where there is none
        if os.path.isdir(path) and not os.path.islink(path):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        return scratch.remove(path)

    def remove_folder(path, *, dir_fd=None):
        if dir_fd is not None or scratch.is_real(path):
            return rmdir(path, dir_fd=dir_fd)
        if os.listdir(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        return scratch.remove(path)

    def remove_tree(path, ignore_errors=False, *args, **kwargs):
        if scratch.is_real(path) or not os.path.isdir(path):
            return rmtree(path, ignore_errors, *args, **kwargs)
        return scratch.remove(path)

    yield os, "remove", remove_file
    yield os, "unlink", remove_file
    yield os, "rmdir", remove_folder
    yield shutil, "rmtree", remove_tree


def _creating(scratch: Scratch) -> Iterator[tuple[object, str, object]]:
    mkdir, symlink = os.mkdir, os.symlink

    def make_folder(path, *args, **kwargs):
        if kwargs.get("dir_fd") is None and not scratch.is_real(path):
            _refuse_existing(path)
            path = scratch.write(path)
        return mkdir(path, *args, **kwargs)

    def link(source, target, **kwargs):
        shutil.copyfile(source, target)

    def rename(source, target, **kwargs):
        if scratch.is_real(source) and scratch.is_real(target):
            return _rename(source, target, **kwargs)
        return scratch.rename(source, target)

    yield os, "mkdir", make_folder
    yield os, "symlink", lambda source, target, *args, **kwargs: symlink(source, scratch.write(target))
    yield os, "link", link
    yield os, "rename", rename
    yield os, "replace", rename


def _listing(scratch: Scratch) -> Iterator[tuple[object, str, object]]:
    def names(path="."):
        return [entry.name for entry in scratch.entries(path)] if scratch.differs(path) else _listdir(path)

    def scan(path="."):
        return _Entries(scratch.entries(path)) if scratch.differs(path) else _scandir(path)

    yield os, "listdir", names
    yield os, "scandir", scan


@functools.cache
def _refuse_others() -> None:
    """Refuse what does not go through the replaced functions; an audit hook cannot be taken out again."""
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple) -> None:
    if not _active:
        return
    if event in _PROGRAMS:
        raise FileNotFoundError(errno.ENOENT, "a dry run starts no other programs", str(args[0]))
    for path in _changed_paths(event, args):
        if path not in (None, ":memory:") and not _active[-1].is_real(path):
            raise PermissionError(errno.EPERM, "a dry run writes nothing", str(path))


def _changed_paths(event: str, args: tuple) -> tuple:
    if event == "open":
        return args[:1] if args[2] and args[2] & _WRITING else ()
    if event not in _CHANGES:
        return ()
    if event not in ("sqlite3.connect", "os.truncate") and -1 not in args[-2:]:
        return ()  # with a folder's descriptor, the last argument, a path is a name in it: shutil.rmtree works so
    return args[1:2] if event == "os.symlink" else args[: _CHANGES[event]]
