"""Reads a memory snapshot from an untrusted file, without running code in it."""

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

LARGEST = 2**30  # bytes, decompressed: some ten million allocations, read in half a minute
_MEMORY_PER_BYTE = 24  # host memory per byte of pickle or JSON, at most: `{},` makes a dict of 64 bytes
_SPARE_MEMORY = 2**30  # bytes
# All that readers of pickle, gzip and JSON raise on a damaged file.
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
    """Reads numbers, strings, lists and dicts, all that a snapshot needs, and refuses every class and function."""

    def find_class(self, module: str, name: str):
        raise InputError(f"it refers to {module}.{name}, which no memory snapshot needs and which could run code")


def read_snapshot(file: str | Path) -> dict[str, Any]:
    """Load a file of torch.cuda.memory._dump_snapshot or SnapshotCallback.

    Returns:
        A dict with at least `segments` and `device_traces`.

    Raises:
        InputError: it cannot be read, could run code, or is not a snapshot.
    """
    path = user_path(file)
    content = read_bytes(path, LARGEST)
    try:
        snapshot = _unpack(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except _DAMAGED as error:
        raise InputError(f"{path} is not a memory snapshot: {one_line(error)}") from error
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise InputError(
            f"{path} is not a memory snapshot: it has no device_traces (torch.cuda.memory._dump_snapshot and "
            "SnapshotCallback write them)"
        )
    return snapshot


def _unpack(content: bytes) -> Any:
    if content[:2] == b"\x1f\x8b":
        with gzip.open(io.BytesIO(content)) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise InputError(
                f"it decompresses to more than {LARGEST // 2**30} GiB: record fewer steps, or fewer max_entries"
            )
    with _memory_limit(_SPARE_MEMORY + _MEMORY_PER_BYTE * len(content)):
        return json.loads(content) if content[:1] == b"{" else _PlainPickle(io.BytesIO(content)).load()


@contextmanager
def _memory_limit(extra: int):
    """A context in which allocating more than `extra` further bytes raises MemoryError, where the system can (Linux).

    Ten bytes of pickle can make Python allocate 64 GiB (CPython issue 115952: the memo grows to any index in the
    file), upon which the system kills processes.
    """
    before = _lower_limit(psutil.Process().memory_info().vms + extra)
    try:
        yield
    finally:
        if before is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, before)


def _lower_limit(size: int) -> tuple[int, int] | None:
    """Limit the process's address space; returns the limits before, or None where nothing changed."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY or soft > size:
            resource.setrlimit(resource.RLIMIT_AS, (size, hard))
            return soft, hard
    except (ImportError, OSError, ValueError):  # Windows has no such limit, macOS refuses to set it
        pass
    return None
