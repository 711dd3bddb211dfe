"""What a checkpoint consists of, noted in it when it is complete: a file lost or changed later is found by name."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_memopt.files import write_whole

FILE = "memory_manifest.json"
_STATE = "trainer_state.json"
# Bytes of a file that are hashed: all of most files, and of large safetensors the header with the tensors' names.
# Reading all of a large model twice would double the time of a save.
_HASHED = 16 * 2**20


def write_manifest(checkpoint: Path) -> None:
    """Note size and hash of every file below a checkpoint folder, in memory_manifest.json."""
    files = {str(file.relative_to(checkpoint)): _entry(file) for file in sorted(_files(checkpoint))}
    write_whole(checkpoint / FILE, json.dumps({"files": files}, indent=2) + "\n")


def manifest_fault(checkpoint: Path) -> str | None:
    """What is missing or changed since the checkpoint was written, by file.

    Returns:
        "" where nothing is; None where there is no manifest, or a stale one.
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
    """Whether somebody has written the checkpoint anew since then, as plain Trainer does in the same folder, or has
    edited its state: another trainer_state.json than the noted one, and newer."""
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


def _fault(file: Path, name: str, noted: Any) -> str:
    if not file.is_file():
        return f"no {name}"
    try:
        found = _entry(file)
    except OSError as error:
        return f"{name}: {error.strerror}"
    if not isinstance(noted, dict) or found["bytes"] != noted.get("bytes"):
        written = noted.get("bytes") if isinstance(noted, dict) else noted
        return f"{name} has {found['bytes']} bytes, and {written} were written"
    if found["sha256"] == noted.get("sha256"):
        return ""
    return f"{name} was changed after it was written; delete {FILE} if that was you"
