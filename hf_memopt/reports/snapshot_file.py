"""Reading a memory snapshot from a file that nobody vouches for."""

import gzip
import io
import json
import pickle
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hf_memopt.errors import InputError, one_line
from hf_memopt.files import read_bytes, user_path

LARGEST = 2**30  # bytes, unpacked: some ten million allocations, which are read in half a minute
_MEMORY_PER_BYTE = 24  # of Python's objects for a byte of pickle or JSON, at most: `{},` makes a dict of 64 bytes
_SPARE_MEMORY = 2**30  # bytes
# Whatever a damaged pickle, gzip or JSON makes its reader raise; it holds no code that could raise something else.
_DAMAGED = (
    pickle.UnpicklingError,
    ValueError,
    EOFError,
    OSError,
    zlib.error,
    AttributeError,
    TypeError,
    LookupError,
    ImportError,
    RecursionError,
    MemoryError,
    OverflowError,
    AssertionError,
)


class _PlainPickle(pickle.Unpickler):
    """Numbers, texts, lists and dicts: all that a snapshot needs. Whatever would call something is refused."""

    def find_class(self, module: str, name: str):
        raise InputError(
            f"it asks for {module}.{name}, which no memory snapshot does: it could run code, so it is not read"
        )


def read_snapshot(file: str | Path) -> dict[str, Any]:
    """What torch.cuda.memory._dump_snapshot or SnapshotCallback wrote.

    Returns:
        A dict with `segments` and `device_traces` at least.

    Raises:
        InputError: it cannot be read, would run code, or is something else.
    """
    path = user_path(file)
    content = read_bytes(path, LARGEST)
    try:
        found = _unpacked(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except _DAMAGED as error:
        raise InputError(f"{path} is no memory snapshot: {one_line(error)}") from error
    if not isinstance(found, dict) or not isinstance(found.get("device_traces"), list):
        raise InputError(
            f"{path} is no memory snapshot: it has no device_traces (torch.cuda.memory._dump_snapshot and "
            "SnapshotCallback write them)"
        )
    return found


def _unpacked(content: bytes) -> Any:
    if content[:2] == b"\x1f\x8b":
        with gzip.open(io.BytesIO(content)) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise InputError(
                f"it unpacks to more than {LARGEST // 2**30} GiB: record fewer steps, or fewer max_entries"
            )
    with _memory_limit(_SPARE_MEMORY + _MEMORY_PER_BYTE * len(content)):
        return json.loads(content) if content[:1] == b"{" else _PlainPickle(io.BytesIO(content)).load()


@contextmanager
def _memory_limit(more: int):
    """Make it a MemoryError to take more memory than so many further bytes, where the system can (Linux).

    Ten bytes of pickle can ask for a table of 64 GiB (CPython issue 115952: the memo grows to any index that the file
    names), which a machine without so much memory answers by killing processes.
    """
    before = _lower_limit(psutil.Process().memory_info().vms + more)
    try:
        yield
    finally:
        if before is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, before)


def _lower_limit(size: int) -> tuple[int, int] | None:
    """Limit the process's address space; the limits before, or None where nothing was changed."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY or soft > size:
            resource.setrlimit(resource.RLIMIT_AS, (size, hard))
            return soft, hard
    except (ImportError, OSError, ValueError):  # Windows has no limits, macOS refuses this one
        pass
    return None
