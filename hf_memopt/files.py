"""Folders of the shipped configs and recipes, and reading and writing of files."""

import contextlib
import json
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, one_line
from hf_memopt.redaction import redact

LARGEST_JSON = 64 * 2**20  # bytes; a report has less than one MiB, and parsing takes some twenty times its size
_PACKAGE = Path(__file__).resolve().parent
_DEEPEST = 60  # levels; Python's own limit of 1000 is shared with everything that walks through the content


def shipped(folder: str) -> Path:
    """The folder `accelerate_configs` or `recipes`: beside the package in a checkout, inside it in a wheel.

    Raises:
        FileNotFoundError: neither place has it (a damaged installation).
    """
    for home in (_PACKAGE, _PACKAGE.parent):
        if (home / folder).is_dir():
            return home / folder
    raise FileNotFoundError(f"{folder}/ is missing from the installation of hf_memopt: reinstall it")


def from_here(path: Path) -> str:
    """A path as a command names it in the current folder: relative to it where it is below, else absolute."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):  # elsewhere, as an installed package is; or the current folder has been removed
        return str(path)


def cache_folder() -> Path:
    """The folder of what can be made again: $HF_MEMOPT_CACHE, by default ~/.cache/hf_memopt; it need not be there."""
    return Path(os.environ.get("HF_MEMOPT_CACHE") or os.path.expanduser("~/.cache/hf_memopt"))


def user_path(text: str | Path) -> Path:
    """A path that a person gave, with `~` expanded; it need not be there.

    Raises:
        InputError: `~name` of nobody here, a name that is too long, or a folder that may not be searched.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"{text}: {one_line(error)}: write the whole path") from None
    is_there(path)
    return path


def is_there(path: Path) -> bool:
    """True if a path exists.

    Raises:
        InputError: that cannot be known; Path.exists() raises what the system says.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"{path} cannot be read: {reason}: give another path, or change its permissions") from None
    return True


def check_links(folder: Path, names: Collection[str] | None = None) -> Path:
    """A folder of others whose files lie in it: a link could name any file of this machine, which would be read, shown
    or copied.

    The hub's cache keeps a snapshot's files in the blobs folder of the same repository (huggingface_hub's
    file_download).

    Args:
        names: of the files that are read; by default any.

    Raises:
        InputError: names the first file that is a link to elsewhere.
    """
    try:
        resolved = folder.resolve()
        links = sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_symlink() and not entry.is_dir())
        allowed = [resolved, *([resolved.parents[1] / "blobs"] if resolved.parent.name == "snapshots" else [])]
        for link in links if names is None else [link for link in links if link.name in names]:
            if not any(link.resolve().is_relative_to(place) for place in allowed):
                raise InputError(f"{link} is a link that leaves its folder: put the file itself there")
    except (OSError, RuntimeError) as error:  # a link to itself
        raise InputError(f"{folder} cannot be read: {one_line(error)}") from error
    return folder


def read_bytes(path: str | Path, largest: int, tail: bool = False) -> bytes:
    """The content of a regular file, at most so many bytes.

    Args:
        tail: of a larger file read the end, in place of refusing it.

    Raises:
        InputError: no such file, not a regular one (a device or a pipe may never end), unreadable, or too large.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits until somebody writes into it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            return _read(handle, path, largest, tail)
        finally:
            os.close(handle)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file (paths are relative to {Path.cwd()})") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or one_line(error)}") from error


def _read(handle: int, path: str | Path, largest: int, tail: bool) -> bytes:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, a pipe or a socket"
        raise InputError(f"{path} is {kind}: give a file")
    if status.st_size > largest and not tail:
        raise InputError(f"{path} has {status.st_size:,} bytes, and at most {largest:,} are read: give a smaller file")
    with os.fdopen(handle, "rb", closefd=False) as file:
        file.seek(max(0, status.st_size - largest))
        return file.read(largest)


def read_json(path: str | Path) -> dict:
    """A JSON object from a file.

    Raises:
        InputError: there is no such file, or it does not hold a JSON object.
    """
    try:
        content = parse_json(read_bytes(path, LARGEST_JSON).decode("utf-8"))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def parse_json(text: str) -> Any:
    """Parse JSON that is not nested too deeply to be walked through.

    Raises:
        ValueError: it is not such JSON.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_DEEPEST}") from None
    if max(text.count("["), text.count("{")) > _DEEPEST:
        _check_depth(content)
    return content


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(_DEEPEST):
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [value for item in nested for value in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {_DEEPEST}")


def write_whole(path: str | Path, content: str | bytes, executable: bool = False) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; text as UTF-8.

    A new file gets the mode that the umask leaves; one that is replaced keeps its own.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}.{os.urandom(4).hex()}")
    # os.open applies the umask; asking for the umask would mean setting it, for all threads.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(temporary, flags, 0o777 if executable else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object for people to keep and to share: without secrets."""
    write_whole(path, json.dumps(redact(content), indent=2, default=str) + "\n")


def folder_for(directory: str | Path) -> Path:
    """The whole path of a folder to write to, which need not be there.

    Raises:
        InputError: it is a file.
    """
    folder = user_path(directory).resolve()
    for place in (folder, *folder.parents):
        if is_there(place):
            if not place.is_dir():
                raise InputError(f"{place} is a file, not a folder to write to")
            break
    return folder


def _says_else(file: Path, text: str) -> bool:
    return is_there(file) and (not file.is_file() or file.read_bytes() != text.encode("utf-8"))


def write_folder(folder: Path, files: dict[str, str], overwrite: bool = False) -> None:
    """Write files, name -> text, into a folder; scripts (*.sh) can be run.

    Args:
        overwrite: replace files that say something else.

    Raises:
        InputError: the folder cannot be written to, or has files of these names that say something else.
    """
    differing = [] if overwrite else [name for name, text in sorted(files.items()) if _says_else(folder / name, text)]
    if differing:
        raise InputError(
            f"{folder} has another {' and '.join(differing)}: name another folder, or replace with --overwrite"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write_whole(folder / file, text, executable=file.endswith(".sh"))
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
