"""Files that a script writes, kept apart: it sees them as written, and afterwards they are gone.

A copy-on-write layer over those of Python's file functions that scripts need to get to train(). What a script creates
or changes lies in a temporary folder, under the same path; what it removes is only hidden from it. This is a
convenience: that nothing else changes is up to the operating system (hf_memopt.confined), which denies the rest.
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
_CHANGERS = ("chmod", "chown", "lchown", "utime", "setxattr")
_lstat, _listdir, _scandir, _rename = os.lstat, os.listdir, os.scandir, os.rename


@contextlib.contextmanager
def scratch_files(*real_folders: str) -> Iterator["Scratch"]:
    """Keep apart what is written while the context lasts.

    Args:
        kept: folders where writing is real.
    """
    cwd = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="hf-memopt-", ignore_cleanup_errors=True) as folder:
        folder = os.path.realpath(folder)
        os.makedirs(os.path.join(folder, "tmp"))
        scratch = Scratch(folder, real_folders)
        with contextlib.ExitStack() as stack:
            stack.callback(os.chdir, cwd)
            for owner, name, function in _functions(scratch):
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, function))
            with (
                mock.patch.object(tempfile, "tempdir", os.path.join(folder, "tmp")),
                mock.patch.object(sys, "dont_write_bytecode", True),
            ):
                yield scratch


class Scratch:
    """The files that a script has written and removed.

    Attributes:
        folder: holds what it has written.
    """

    def __init__(self, folder: str, real: tuple[str, ...] = ()):
        self.folder = folder
        real = (folder, *real, "/dev", "/proc")
        self._real = {absolute(path) for path in real for absolute in (os.path.abspath, os.path.realpath)}
        self._removed: set[str] = set()

    def is_real(self, path) -> bool:
        """True if a path, or a file descriptor, is written to as it is."""
        path = _absolute(path)
        return path is None or any(path == folder or path.startswith(folder + os.sep) for folder in self._real)

    def read(self, path):
        """The path to read from: the copy where there is one, or where the original counts as removed."""
        if self.is_real(path):
            return path
        copy = self._copy(_absolute(path))
        return copy if _exists(copy) or self._is_removed(_absolute(path)) else path

    def create(self, path, new: bool = True):
        """The path at which something is created.

        Args:
            new: nothing may be there.

        Raises:
            FileExistsError: something is there.
            FileNotFoundError: there is no such folder.
        """
        if new and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        if self.is_real(path):
            return path
        if not os.path.isdir(os.path.dirname(_absolute(path))):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        copy = self._copy(_absolute(path))
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        return copy

    def write(self, path, content: bool = True):
        """The path of a file that is written to, as create() has it; of a link, what it names.

        Args:
            content: the original's is kept, for files that are changed in place.

        Raises:
            PermissionError: the original is too large to copy.
        """
        if self.is_real(path):
            return path
        if os.path.islink(path):
            return self.write(os.path.join(os.path.dirname(_absolute(path)), os.readlink(path)), content)
        copy = self.create(path, new=False)
        if content and not _exists(copy) and os.path.isfile(path):
            if os.path.getsize(path) > _LARGEST_COPY:
                raise PermissionError(errno.EPERM, "a dry run writes nothing, and cannot copy this large file", path)
            shutil.copyfile(path, copy)
        return copy

    def open(self, path, writes, new, empty):
        """The path to open.

        Args:
            writes, new, empty: whether it is opened for writing, must not exist, and loses its content.
        """
        if not writes:
            return self.read(path)
        return self.create(path) if new else self.write(path, content=not empty)

    def remove(self, path) -> None:
        """Hide a path and everything under it; what the script wrote there is removed."""
        copy = self._copy(_absolute(path))
        if os.path.isdir(copy) and not os.path.islink(copy):
            shutil.rmtree(copy)
        elif _exists(copy):
            os.unlink(copy)
        self._removed.add(_absolute(path))

    def rename(self, source, target) -> None:
        """Move a file, or a folder that the script created."""
        if os.path.isdir(source):
            if not self.is_real(source) and not self._is_removed(_absolute(source)) and _exists(_absolute(source)):
                raise PermissionError(errno.EPERM, "a dry run moves no folder that it did not create", str(source))
            _rename(self.read(source), self.create(target, new=False))
        else:
            shutil.copyfile(source, target)
        os.unlink(source) if os.path.isfile(source) else self._removed.add(_absolute(source))

    def differs(self, path) -> bool:
        """True if a folder's content is not the original's alone."""
        if self.is_real(path):
            return False
        original = _absolute(path)
        return _exists(self._copy(original)) or any(removed.startswith(original) for removed in self._removed)

    def entries(self, path) -> list[os.DirEntry]:
        """A folder's content: the copies, and the original's that are neither copied nor removed."""
        copy, original = self._copy(_absolute(path)), _absolute(path)
        written = list(_scandir(copy)) if os.path.isdir(copy) else []
        if self._is_removed(original) or not _exists(original):
            return written
        names = {entry.name for entry in written}
        hidden = {os.path.basename(path) for path in self._removed if os.path.dirname(path) == original}
        return written + [entry for entry in _scandir(original) if entry.name not in names | hidden]

    def _copy(self, original: str) -> str:
        return f"{self.folder}/files{original}"

    def _is_removed(self, original: str) -> bool:
        return any(str(part) in self._removed for part in (original, *Path(original).parents))


def _absolute(path) -> str | None:
    """An absolute path, for None that of the current folder; None for a file descriptor."""
    return None if isinstance(path, int) else os.path.abspath(os.fsdecode("." if path is None else path))


def _exists(path: str) -> bool:
    """True if there is something at a path itself, whatever the script sees there."""
    try:
        _lstat(path)
    except OSError:
        return False
    return True


class _Entries(contextlib.closing):
    """os.scandir()'s iterator over entries that are known."""

    def __init__(self, entries):
        self._entries = iter(entries)
        super().__init__(self)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._entries)

    def close(self):
        self._entries = iter(())


def _functions(scratch: Scratch) -> Iterator[tuple[object, str, object]]:
    """Owner, name and replacement of functions that take a path; with a folder's descriptor they are the system's."""
    unlink, rmdir, rmtree, mkdir, symlink = os.unlink, os.rmdir, shutil.rmtree, os.mkdir, os.symlink
    open_file, open_descriptor = io.open, os.open

    @functools.wraps(open_file)
    def opened(file, mode="r", *args, **kwargs):
        letters = set(mode)
        path = scratch.open(file, letters & set("wax+"), "x" in letters, "w" in letters)
        return open_file(path, mode, *args, **kwargs)

    def opened_descriptor(path, flags, *args, dir_fd=None, **kwargs):
        if dir_fd is None:
            path = scratch.open(path, flags & _WRITING, flags & os.O_EXCL, flags & os.O_TRUNC)
        return open_descriptor(path, flags, *args, dir_fd=dir_fd, **kwargs)

    def changed(path):
        # Raises where there is none: the system calls that follow may seem to succeed (confined.rights).
        os.lstat(path)
        return scratch.write(path)

    def truncate(path, length):
        """By a descriptor: an old kernel's Landlock does not tell one file from another here."""
        with open_file(scratch.write(path), "r+b", closefd=not isinstance(path, int)) as file:
            file.truncate(length)

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

    def make_folder(path, mode=0o777, *, dir_fd=None):
        return mkdir(path if dir_fd is not None else scratch.create(path), mode, dir_fd=dir_fd)

    def make_link(source, target, target_is_directory=False, *, dir_fd=None):
        if dir_fd is None and not scratch.is_real(target):
            source = scratch.read(os.path.join(os.path.dirname(_absolute(target)), source))
            target = scratch.create(target)
        return symlink(source, target, target_is_directory, dir_fd=dir_fd)

    def rename(source, target, **kwargs):
        if kwargs or (scratch.is_real(source) and scratch.is_real(target)):
            return _rename(source, target, **kwargs)
        return scratch.rename(source, target)

    def names(path="."):
        return [entry.name for entry in scratch.entries(path)] if scratch.differs(path) else _listdir(path)

    def scan(path="."):
        return _Entries(scratch.entries(path)) if scratch.differs(path) else _scandir(path)

    for name in _READERS:
        yield os, name, _with_path(getattr(os, name, None), scratch.read)
    for name in _CHANGERS:
        yield os, name, _with_path(getattr(os, name, None), changed)
    for owner, name in _OPENERS:
        yield owner, name, opened
    yield from (
        (os, "open", opened_descriptor),
        (os, "truncate", truncate),
        (os, "remove", remove_file),
        (os, "unlink", remove_file),
        (os, "rmdir", remove_folder),
        (os, "mkdir", make_folder),
        (os, "symlink", make_link),
        (os, "rename", rename),
        (os, "replace", rename),
        (os, "link", lambda source, target, **kwargs: shutil.copyfile(source, target)),
        (os, "listdir", names),
        (os, "scandir", scan),
        (shutil, "rmtree", remove_tree),
    )


def _with_path(function, where):
    """A function whose first argument, a path, is replaced."""

    @functools.wraps(function or len)
    def call(path, *args, **kwargs):
        return function(path if kwargs.get("dir_fd") is not None else where(path), *args, **kwargs)

    return call
