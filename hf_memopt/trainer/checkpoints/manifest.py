"""memory_manifest.json: size and hash of a checkpoint's files, to find files that are lost or damaged later."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_memopt.files import write_whole

FILE = "memory_manifest.json"
_STATE = "trainer_state.json"
# Bytes hashed per file: all of most files, and the header of large safetensors. Hashing all of a large model would
# double the time of a save.
_HASHED = 16 * 2**20


def write_manifest(checkpoint: Path) -> None:
    """Write the size and hash of every file of a checkpoint to its memory_manifest.json."""
    files = {str(file.relative_to(checkpoint)): _entry(file) for file in sorted(_files(checkpoint))}
    write_whole(checkpoint / FILE, json.dumps({"files": files}, indent=2) + "\n")


def manifest_fault(checkpoint: Path) -> str | None:
    """The first file that is missing or changed since the checkpoint was written, and how.

    Returns:
        "" where there is none; None without a manifest, or with a stale one.
    """
    try:
        files = _read(checkpoint)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return f"{FILE} cannot be read"
    if is_stale(checkpoint):
        return None
    return next((fault for name, entry in files.items() if (fault := _fault(checkpoint / name, name, entry))), "")


def is_stale(checkpoint: Path) -> bool:
    """True if trainer_state.json is newer than the manifest and not the one it lists: a plain Trainer has written to
    the folder, or somebody has edited the state."""
    state = checkpoint / _STATE
    try:
        newer = state.stat().st_mtime_ns > (checkpoint / FILE).stat().st_mtime_ns
        return newer and _read(checkpoint)[_STATE] != _entry(state)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / FILE).read_text(encoding="utf-8"))["files"])


def _files(checkpoint: Path):
    return (file for file in checkpoint.rglob("*") if file.is_file() and file.name != FILE)


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        start = opened.read(_HASHED)
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(start).hexdigest()}


def _fault(file: Path, name: str, entry: Any) -> str:
    if not file.is_file():
        return f"no {name}"
    try:
        actual = _entry(file)
    except OSError as error:
        return f"{name}: {error.strerror}"
    if not isinstance(entry, dict) or actual["bytes"] != entry.get("bytes"):
        written = entry.get("bytes") if isinstance(entry, dict) else entry
        return f"{name} has {actual['bytes']} bytes, and {written} were written"
    if actual["sha256"] == entry.get("sha256"):
        return ""
    return f"{name} was changed after it was written; delete {FILE} if that was you"
