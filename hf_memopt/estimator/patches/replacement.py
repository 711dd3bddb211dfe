"""The one way in which a trace replaces a name of another library, checked against the table and restored."""

import functools
import importlib.util
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import metadata
from typing import Any
from unittest import mock

from hf_memopt.errors import IncompatibleLibrary, one_line
from hf_memopt.estimator.patches.names import Names, Use
from hf_memopt.estimator.patches.table import TABLE, Part
from hf_memopt.stack.versions import has

# Parts that no row could mend: an older torch has other fake tensors, an older DeepSpeed fills its buckets by hooks
# that no trace calls.
_OLDEST = {Part.EVERY_JOB: ("torch", "2.13"), Part.DEEPSPEED: ("deepspeed", "0.19.4")}

# Tests set it: replaced name -> how often it was called, 0 for values. None costs a trace nothing.
calls: Counter[str] | None = None


@functools.cache
def check(part: Part) -> None:
    """Compare a part's rows with the installed libraries, once a process.

    Raises:
        IncompatibleLibrary: a name is missing, or does not take the parameters that the trace relies on.
    """
    for fault in faults(part):
        raise IncompatibleLibrary(fault)


def faults(part: Part) -> Iterator[str]:
    """One sentence for every name of a part that the installed libraries do not have as the table has it."""
    library, oldest = _OLDEST.get(part, ("", ""))
    if library and not has(library, oldest):
        yield f"predictions of {part.value} need {library} {oldest} or newer, and {version(library)} is installed"
        return
    broken = set()
    for names in TABLE[part]:
        library = names.library
        if not names.needed or library in broken or importlib.util.find_spec(library) is None:
            continue  # whoever needs a missing library says so
        try:
            importlib.import_module(library)
        except Exception as error:  # of any kind: a broken installation raises what it likes
            broken.add(library)
            yield f"{library} {version(library)} cannot be imported: {type(error).__name__}: {one_line(error)}"
            continue
        for path, parameters in names.paths().items():
            if (reason := _fault(path, parameters, names.use)) is not None:
                name = path.replace(":", ".")
                yield f"hf_memopt does not know {library} {version(library)}: {name} {reason}"


def replaced(path: str, new: Any, importer: Any = None) -> AbstractContextManager:
    """A context in which a name of the table is replaced.

    Args:
        path: `module:name` or `module:Class.name`, as `Names.paths` has it.
        new: what takes its place.
        importer: a module that has imported the name from its owner, and calls its own copy.
    """
    check(_place(path)[0])
    if not _place(path)[1].needed:
        return nullcontext()
    module, _, name = path.partition(":")
    kind, _, name = name.rpartition(".")
    owner = importer or _resolve(f"{module}:{kind}" if kind else module)
    return mock.patch.object(owner, name, new if calls is None else _counting(path, new))


@contextmanager
def all_replaced(replacements: dict[str, Any]) -> Iterator[None]:
    """replaced() for several names at once: path -> what takes its place."""
    with ExitStack() as stack:
        for path, new in replacements.items():
            stack.enter_context(replaced(path, new))
        yield


def original(path: str) -> Any:
    """Return what a name of the table stands for now.

    Raises:
        IncompatibleLibrary: the installed library does not have it.
    """
    check(_place(path)[0])
    return _resolve(path)


def version(library: str) -> str:
    """The installed version of a library."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # this package, where it runs from its repository
        return "(not installed)"


@functools.cache
def _place(path: str) -> tuple[Part, Names]:
    """A name's part of the table, and its row."""
    return next((part, names) for part, rows in TABLE.items() for names in rows if path in names.paths())


def _resolve(path: str) -> Any:
    # import_module and not attributes: `deepspeed.comm.torch` as an attribute is torch itself.
    return pkgutil.resolve_name(path) if ":" in path else importlib.import_module(path)


def _fault(path: str, parameters: str | None, use: Use) -> str | None:
    """The fault of a name, as a sentence; None if there is none."""
    try:
        if use is Use.INSTANCE:
            owner, _, name = path.rpartition(".")
            functions = (value for value in vars(_resolve(owner)).values() if inspect.isfunction(value))
            return None if any(name in function.__code__.co_names for function in functions) else "is missing"
        found = _resolve(path)
    except (ImportError, AttributeError):
        return "is missing"
    if parameters is None:
        return None
    known = [name for name in parameters.split(", ") if name]
    actual = list(inspect.signature(found).parameters)
    return None if actual[: len(known)] == known else f"takes ({', '.join(actual)}) instead of ({parameters}, …)"


def _counting(path: str, new: Any) -> Any:
    """A replacement that counts its calls."""
    calls[path] += 0
    if isinstance(new, classmethod):
        return classmethod(_counting(path, new.__func__))
    if isinstance(new, type):
        counted: Callable = _counting(path, new.__init__)
        return type(new.__name__, (new,), {"__init__": counted})
    if not callable(new):
        return new

    @functools.wraps(new)
    def count(*args, **kwargs):
        calls[path] += 1
        return new(*args, **kwargs)

    return count
