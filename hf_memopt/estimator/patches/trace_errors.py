"""Errors inside a trace and their meaning: a setting that cannot be, or a library that the trace does not fit."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hf_memopt.errors import IncompatibleLibrary, InputError, one_line
from hf_memopt.estimator.private_names import version

# What the libraries raise for settings that they refuse.
_REFUSALS = (ValueError, ImportError, AssertionError, ArithmeticError, RuntimeError)
_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "torchao")
_SWAPPED = re.compile(r"More elements (\d+) than buffer size (\d+)")  # deepspeed.runtime.swap_tensor
_MISSING_INPUT = re.compile(r"(\w+)\.forward\(\) missing")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


@contextmanager
def explained(fields: dict[str, Any], batch: Iterable[str] = (), own_batch: bool = False) -> Iterator[None]:
    """Give errors inside a trace their meaning.

    Args:
        fields: the job's TrainingArguments fields.
        batch: the names of the tensors that the model got.
        own_batch: they are of the user's own data.

    Raises:
        InputError: a setting that the model, the Trainer or an engine refuses.
        IncompatibleLibrary: a library raised what no setting explains.
    """
    try:
        yield
    except (InputError, IncompatibleLibrary):
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InputError(
            f"{place(error)} asks for values that only a real batch has ({error.func}): an estimate computes shapes; "
            "use a form whose output's shape does not depend on values"
        ) from error
    except _REFUSALS as error:
        if sizes := _SWAPPED.fullmatch(one_line(error)):
            raise InputError(
                f"deepspeed: offload_param.buffer_size={sizes[2]} is smaller than a process's part of a "
                f"weight, {sizes[1]} elements: set it to as many or more"
            ) from error
        raise InputError(f"the job cannot be traced: {_whose(error)}{one_line(error)}") from error
    except Exception as error:
        if whose := _whose(error):
            raise InputError(f"the job cannot be traced: {whose}{type(error).__name__}: {one_line(error)}") from error
        if (name := _unknown_argument(error, fields)) is not None:
            raise InputError(f"{name}: {one_line(error)}") from error
        if (model_type := _refusing_model(error)) is not None:
            instead = "" if own_batch else "; estimate_trainer() and dry-run take the batches of your own data"
            raise InputError(
                f"model type {model_type!r} cannot be trained on {', '.join(batch)}: {one_line(error)}{instead}"
            ) from error
        raise IncompatibleLibrary(
            f"tracing fails in {_where(error)}: {type(error).__name__}: {one_line(error)[:300]}; "
            "please report it with `hf-memopt doctor --json`"
        ) from error


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Errors of a user's data set, collator or loader as input errors that begin with `what` and name the line.

    Raises:
        InputError: whatever was raised.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {_whose(error)}{type(error).__name__}: {one_line(error)}") from error


def _unknown_argument(error: Exception, fields: dict[str, Any]) -> str | None:
    """`field.key` where a library does not know a key of a field that holds keyword arguments."""
    unexpected = _UNEXPECTED.search(str(error))
    if unexpected is None:
        return None
    field = next((name for name, value in fields.items() if isinstance(value, dict) and unexpected[1] in value), None)
    return field and f"{field}.{unexpected[1]}"


def _refusing_model(error: Exception) -> str | None:
    """The folder or class of transformers' model that lacks an input, or a value in its configuration: its own code
    raised the error, its signature did, or what it gave None to; None where another library did."""
    if missing := _MISSING_INPUT.search(str(error)):
        return missing[1]
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    lacks = "NoneType" in str(error) or files[-1].name == "configuration_utils.py"
    models = (file.parent for file in (reversed(files) if lacks else files[-1:]))
    return next((model.name for model in models if model.parent.parts[-2:] == ("transformers", "models")), None)


def place(error: BaseException) -> str:
    """File and line of the code outside torch and this package that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parents[2])
    outside = [frame for frame in frames if not frame.filename.startswith(own) and "torch" not in _parts(frame)]
    frame = (outside or frames)[-1]
    return f"{frame.filename}, line {frame.lineno},"


def _whose(error: BaseException) -> str:
    """The user's line that led to an error, and where it was raised if elsewhere; "" where libraries are among
    themselves."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not _in_library(frame)]
    if not users:
        return ""
    last = frames[-1]
    raised = "" if users[-1] is last else f" (raised in {Path(last.filename).name}:{last.lineno})"
    return f"{users[-1].filename}, line {users[-1].lineno}{raised}: "


def _in_library(frame: traceback.FrameSummary) -> bool:
    """True if a frame is of an installed package, of Python, of this package, or of no file."""
    libraries = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], sysconfig.get_path("stdlib")))
    installed = {"site-packages", "dist-packages"} & set(_parts(frame))
    return bool(installed) or frame.filename.startswith((*libraries, "<"))


def _parts(frame: traceback.FrameSummary) -> tuple[str, ...]:
    return Path(frame.filename).parts


def _where(error: Exception) -> str:
    """The libraries on the way to an error with their versions, the one that raised it first: this package only
    there, since every trace passes through it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in reversed(frames)]
    passed = list(dict.fromkeys(name for name in packages if name in (*_LIBRARIES, "hf_memopt")))
    named = [name for at, name in enumerate(passed) if name != "hf_memopt" or at == 0]
    return ", ".join(f"{name} {version(name)}" for name in named)
