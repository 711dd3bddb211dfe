"""What an error inside a trace means: a setting that cannot be, or a library that the trace does not fit."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_memopt.errors import IncompatibleLibrary, InputError, one_line
from hf_memopt.estimator.patches.replacement import version

# What the libraries raise for settings that they refuse.
_REFUSALS = (ValueError, ImportError, AssertionError, ArithmeticError, RuntimeError)
# What they raise where something that they or the trace look for is not there.
_DRIFT = (AttributeError, LookupError, TypeError)
_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "torchao")
_SWAPPED = re.compile(r"More elements (\d+) than buffer size (\d+)")  # deepspeed.runtime.swap_tensor
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


@contextmanager
def explained(fields: dict[str, Any]) -> Iterator[None]:
    """Give errors inside a trace their meaning.

    Args:
        fields: the job's TrainingArguments fields.

    Raises:
        InputError: a setting that the model, the Trainer or an engine refuses.
        IncompatibleLibrary: a library raised what no setting explains.
    """
    try:
        yield
    except (InputError, IncompatibleLibrary):
        raise
    except _REFUSALS as error:
        if sizes := _SWAPPED.fullmatch(one_line(error)):
            raise InputError(
                f"deepspeed: offload_param.buffer_size={sizes[2]} is smaller than a process's part of a "
                f"weight, {sizes[1]} elements: set it to as many or more"
            ) from error
        raise InputError(f"the job cannot be traced: {one_line(error)}") from error
    except _DRIFT as error:
        if (name := _unknown_argument(error, fields)) is not None:
            raise InputError(f"{name}: {one_line(error)}") from error
        raise IncompatibleLibrary(
            f"tracing fails in {_where(error)}: {type(error).__name__}: {one_line(error)[:300]}; "
            "please report it with `hf-memopt doctor --json`"
        ) from error


def _unknown_argument(error: Exception, fields: dict[str, Any]) -> str | None:
    """`field.key` where a library does not know a key of a field that holds keyword arguments."""
    unexpected = _UNEXPECTED.search(str(error))
    if unexpected is None:
        return None
    held_by = (name for name, value in fields.items() if isinstance(value, dict) and unexpected[1] in value)
    field = next(held_by, None)
    return field and f"{field}.{unexpected[1]}"


def _where(error: Exception) -> str:
    """The libraries on the way to an error with their versions, the one that raised it first."""
    folders = [set(Path(frame.filename).parts) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    passed = dict.fromkeys(name for parts in folders for name in _LIBRARIES if name in parts)
    return ", ".join(f"{name} {version(name)}" for name in passed) or "hf_memopt"
