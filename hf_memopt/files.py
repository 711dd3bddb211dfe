"""Where the shipped configs and recipes are, and how files are read and written."""

import json
import os
import tempfile
from pathlib import Path

from hf_memopt.errors import InputError, one_line

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """The folder `accelerate_configs` or `recipes`: beside the package in a checkout, inside it in a wheel.

    Raises:
        FileNotFoundError: neither place has it (a damaged installation).
    """
    for home in (_PACKAGE, _PACKAGE.parent):
        if (home / folder).is_dir():
            return home / folder
    raise FileNotFoundError(f"{folder}/ is missing from the installation of hf_memopt: reinstall it")


def read_json(path: str | Path) -> dict:
    """A JSON object from a file.

    Raises:
        InputError: there is no such file, or it does not hold a JSON object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file (paths are relative to {Path.cwd()})") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def write_whole(path: str | Path, content: str | bytes, executable: bool = False) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; text as UTF-8."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.chmod(temporary, 0o755 if executable else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def folder_for(directory: str | Path) -> Path:
    """The whole path of a folder to write to, which need not be there.

    Raises:
        InputError: it is a file.
    """
    folder = Path(directory).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder to write to")
    return folder


def write_folder(folder: Path, files: dict[str, str]) -> None:
    """Write files, name -> text, into a folder; scripts (*.sh) can be run.

    Raises:
        InputError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write_whole(folder / file, text, executable=file.endswith(".sh"))
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
