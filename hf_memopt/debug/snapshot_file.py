"""Reading a memory snapshot from a file that nobody vouches for."""

import gzip
import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError

LARGEST = 4 * 2**30  # bytes, unpacked


class _PlainPickle(pickle.Unpickler):
    """Numbers, texts, lists and dicts: all that a snapshot needs. Whatever would call something is refused."""

    def find_class(self, module: str, name: str):
        raise InputError(f"it asks for {module}.{name}, which no memory snapshot does: it could run code, so it is "
                         f"not "
                         "read")  # fmt: skip


def read_snapshot(file: str | Path) -> dict[str, Any]:
    """What torch.cuda.memory._dump_snapshot or SnapshotCallback wrote.

    Returns:
        A dict with `segments` and `device_traces` at least.

    Raises:
        InputError: it cannot be read, would run code, or is something else.
    """
    path = Path(file).expanduser()
    try:
        packed = path.read_bytes() if path.stat().st_size <= LARGEST else None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if packed is None:
        raise InputError(f"{path} has more than {LARGEST // 2**30} GiB: record fewer steps, or fewer max_entries")
    try:
        found = _unpacked(packed)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (pickle.UnpicklingError, ValueError, EOFError, OSError, zlib.error, AttributeError, TypeError, IndexError,
            KeyError, ImportError, RecursionError, MemoryError, OverflowError) as error:  # fmt: skip
        raise InputError(f"{path} is no memory snapshot: {str(error) or type(error).__name__}") from error
    if not isinstance(found, dict) or not isinstance(found.get("device_traces"), list):
        raise InputError(f"{path} is no memory snapshot: it has no device_traces (torch.cuda.memory._dump_snapshot "
                         f"and "
                         "SnapshotCallback write them)")  # fmt: skip
    return found


def _unpacked(packed: bytes) -> Any:
    if packed[:2] == b"\x1f\x8b":
        with gzip.open(io.BytesIO(packed)) as file:
            packed = file.read(LARGEST + 1)
        if len(packed) > LARGEST:
            raise InputError(f"it unpacks to more than {LARGEST // 2**30} GiB")
    if packed[:1] == b"{":
        return json.loads(packed)
    return _PlainPickle(io.BytesIO(packed)).load()
