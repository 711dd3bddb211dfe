"""YAML that a user wrote, as values."""

import re
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, one_line

# PyYAML reads about a megabyte in two seconds, and the longest shipped configuration has two kilobytes.
_MOST_BYTES = 2**20


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        InputError: it is not YAML.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = f"{error.problem or one_line(error)}"[:200]
        raise InputError(
            f"{where}: {line}not readable as YAML: {problem} (check the indentation and the quotes)"
        ) from error
    except Exception as error:  # YAMLError, and what int(), float() and datetime raise for what looks like theirs
        raise InputError(f"{where}: not readable as YAML: {one_line(error)[:300]}") from error


def read_yaml_file(path: str | Path, where: str) -> Any:
    """The value of a YAML or JSON file.

    Args:
        where: begins an error's message.

    Raises:
        InputError: there is no such file, it is too large for a configuration, or not YAML in UTF-8.
    """
    return read_yaml(read_text(path, where), where)


def read_text(path: str | Path, where: str) -> str:
    """The text of a configuration file.

    Raises:
        InputError: there is no such file, it is too large for a configuration, or not UTF-8.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f"{where}: is a folder, not a file")
        if not path.is_file():
            raise InputError(f"{where}: no such file (paths are relative to {Path.cwd()})")
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise InputError(f"{where}: has {size / 2**20:.1f} MiB, which is no configuration file")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{where}: line {line} is not UTF-8 ({error.reason}): save the file as UTF-8") from error
    except InputError:
        raise
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise InputError(f"{where}: cannot be read: {one_line(error)}") from error


def module_names(value: Any) -> Any:
    """A list of the modules that a text names, with commas or spaces between them. peft takes a text for a pattern of
    a whole path, of which a name is none; other patterns, and all-linear, stay as they are."""
    named = isinstance(value, str) and re.fullmatch(r"[\w.,\s]*\w", value)
    return re.split(r"[,\s]+", value.strip()) if named else value
