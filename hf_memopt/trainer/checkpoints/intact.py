"""Finds the checkpoint to resume from: the requested one, or the newest intact one.

memory_manifest.json holds size and hash of a checkpoint's files, to find those that are lost or damaged later.
"""

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, one_line
from hf_memopt.files import check_links, write_whole

logger = logging.getLogger(__name__)
MANIFEST = "memory_manifest.json"
STATES_FOLDER = "optimizer"  # in a checkpoint of a model that from_pretrained sharded (sharded_states.py)
_STATE = "trainer_state.json"
# Bytes hashed per file: all of most files, and the header of large safetensors. Hashing all of a large model would
# double the time of a save.
_HASHED = 16 * 2**20


def find_checkpoint(requested: str | bool | None, output_dir: str | Path, save_only_model: bool) -> str | None:
    """The checkpoint that a run was asked to resume from: True stands for the newest intact one, False for none.

    Raises:
        InputError: it is missing or damaged.
    """
    if requested is None or requested is False:
        return None
    if requested is not True:
        check_intact(Path(requested), save_only_model)
        return str(requested)
    newest = newest_intact(output_dir, save_only_model)
    if newest is None:
        raise InputError(f"resume_from_checkpoint: {output_dir} holds no checkpoint-N folder")
    return str(newest)


def newest_intact(output_dir: str | Path, save_only_model: bool = False) -> Path | None:
    """The newest intact checkpoint-N in a run's folder; None where there is no checkpoint.

    Warns about each newer one that is damaged.

    Raises:
        InputError: all checkpoints are damaged.
    """
    faults = {}
    for checkpoint in _newest_first(Path(output_dir)):
        fault = checkpoint_fault(checkpoint, save_only_model)
        if not fault:
            for damaged, why in faults.items():
                logger.warning("%s is damaged (%s): resuming from %s instead", damaged, why, checkpoint.name)
            return checkpoint
        faults[checkpoint.name] = fault
    if faults:
        listed = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
        raise InputError(
            f"{output_dir} has no checkpoint that is intact ({listed}): start afresh with another output_dir, or with "
            "--resume_from_checkpoint no"
        )
    return None


def check_intact(checkpoint: Path, save_only_model: bool = False) -> None:
    """Raise unless a requested checkpoint can be resumed from.

    Raises:
        InputError: it is missing or damaged. The message names the newest intact one beside it.
    """
    if not checkpoint.is_dir():
        raise InputError(f"resume_from_checkpoint: {checkpoint} is not a folder")
    fault = checkpoint_fault(checkpoint, save_only_model)
    if not fault:
        return
    checkpoints = (folder for folder in _newest_first(checkpoint.parent) if folder.name != checkpoint.name)
    intact = next((intact for intact in checkpoints if not checkpoint_fault(intact, save_only_model)), None)
    instead = f"name {intact.name}, which is intact" if intact else "start afresh with another output_dir"
    raise InputError(f"resume_from_checkpoint: {checkpoint} is damaged ({fault}): {instead}")


def checkpoint_fault(checkpoint: Path, save_only_model: bool = False) -> str:
    """Name what is missing, truncated or changed in a checkpoint; "" where it is intact.

    A checkpoint of plain Trainer has no manifest, so its files are opened instead.
    """
    try:
        check_links(checkpoint)
    except InputError as error:
        return str(error)
    fault = manifest_fault(checkpoint)
    return _fault_of_files(checkpoint, save_only_model) if fault is None else fault


def _newest_first(folder: Path) -> list[Path]:
    def step(checkpoint: Path) -> int:
        number = checkpoint.name.removeprefix("checkpoint-")
        return int(number) if number.isdecimal() else -1

    folders = [path for path in folder.glob("checkpoint-*") if path.is_dir() and step(path) >= 0]
    return sorted(folders, key=step, reverse=True)


def _fault_of_files(checkpoint: Path, save_only_model: bool) -> str:
    from transformers import TrainerState

    if not (checkpoint / _STATE).is_file():
        return f"no {_STATE}"
    for pattern in ("*config.json", "*.index.json", "memory_state.json"):  # read when a run resumes
        for file in sorted(checkpoint.glob(pattern)):
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                return f"{file.name}: {one_line(error)}"
            if not isinstance(content, dict):
                return f"{file.name} holds a {type(content).__name__}, not an object"
    try:
        steps = TrainerState.load_from_json(str(checkpoint / _STATE)).global_step
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return f"{_STATE}: {one_line(error)}"
    if not isinstance(steps, int) or steps < 0:
        return f"{_STATE}: global_step is {steps!r}"
    if any(checkpoint.glob("global_step*")) or any(checkpoint.glob("pytorch_model_fsdp*")):
        return ""  # folders of DeepSpeed or FSDP, which check them when they load
    patterns = ("model*.safetensors", "adapter_model.safetensors", "*/adapter_model.safetensors")
    weights = [file for pattern in patterns for file in checkpoint.glob(pattern)]
    if not weights and not any(checkpoint.glob("*_model*.bin")):
        return "no model.safetensors or adapter_model.safetensors"
    for index in checkpoint.glob("*.safetensors.index.json"):
        missing = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) - {
            file.name for file in weights
        }
        if missing:
            return f"no {min(missing)}"
    faults = map(_safetensors_fault, weights)
    if not save_only_model:
        faults = (*faults, *_faults_of_states(checkpoint))
    return next(filter(None, faults), "")


def _faults_of_states(checkpoint: Path) -> Iterator[str]:
    states = f"{STATES_FOLDER}/.metadata" if (checkpoint / STATES_FOLDER).is_dir() else "optimizer.pt"
    for name in (states, "scheduler.pt"):
        if not (checkpoint / name).is_file():
            yield f"no {name}"
    random_states = list(checkpoint.glob("rng_state*.pth"))
    if not random_states:  # checkpoints of Ray Tune's trials have none
        logger.warning(
            "%s has no rng_state.pth: dropout will draw other masks than without the interruption", checkpoint
        )
    for file in (*checkpoint.glob("*.pt"), *random_states):
        yield _tensors_fault(file)


def _safetensors_fault(file: Path) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"{file.name}: {one_line(error)}"


def _tensors_fault(file: Path) -> str:
    """Check a file of torch.save by opening its zip archive, whose directory is at the end: a truncated one fails.

    Unpickles nothing, and reads only the directory of a large file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        return f"{file.name}: {one_line(error)}"
    return "" if any(name.endswith("data.pkl") for name in names) else f"{file.name} is not what torch.save writes"


def write_manifest(checkpoint: Path) -> None:
    """Write the size and hash of every file of a checkpoint to its memory_manifest.json."""
    present = (file for file in sorted(checkpoint.rglob("*")) if file.is_file() and file.name != MANIFEST)
    files = {str(file.relative_to(checkpoint)): _entry(file) for file in present}
    write_whole(checkpoint / MANIFEST, json.dumps({"files": files}, indent=2) + "\n")


def manifest_fault(checkpoint: Path) -> str | None:
    """The first file that is missing or changed since the checkpoint was written, and how.

    Returns:
        "" where there is none; None without a manifest, or with a stale one.
    """
    try:
        files = _read_manifest(checkpoint)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    if is_stale(checkpoint):
        return None
    return next(filter(None, (_changed(checkpoint / name, name, entry) for name, entry in files.items())), "")


def is_stale(checkpoint: Path) -> bool:
    """True if trainer_state.json is newer than the manifest and not the one it lists: a plain Trainer has written to
    the folder, or somebody has edited the state."""
    state = checkpoint / _STATE
    try:
        newer = state.stat().st_mtime_ns > (checkpoint / MANIFEST).stat().st_mtime_ns
        return newer and _read_manifest(checkpoint)[_STATE] != _entry(state)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"])


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        start = opened.read(_HASHED)
    return {"bytes": file.stat().st_size, "sha256": hashlib.sha256(start).hexdigest()}


def _changed(file: Path, name: str, entry: Any) -> str:
    """How a file differs from its entry in the manifest; "" where it does not."""
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
    return f"{name} was changed after it was written; delete {MANIFEST} if that was you"
