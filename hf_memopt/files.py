"""Where the shipped configs and recipes are, and how files are written."""

import os
import tempfile
from pathlib import Path

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


def write_whole(path: str | Path, text: str, executable: bool = False) -> None:
    """Write a text file so that a reader sees the old content or the new, never a part."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o755 if executable else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
