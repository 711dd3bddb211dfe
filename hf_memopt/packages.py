"""Packages that only some commands need: named before any work starts, not in a traceback after it."""

import importlib.util

from hf_memopt.errors import InputError


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    return importlib.util.find_spec(package) is not None


def require(package: str, needed_by: str) -> None:
    """Refuse what needs a missing package.

    Args:
        needed_by: the setting or command, as the user wrote it.

    Raises:
        InputError: the package is not installed.
    """
    if not is_installed(package):
        raise InputError(f"{needed_by} needs {package}, which is not installed: pip install {package}")
