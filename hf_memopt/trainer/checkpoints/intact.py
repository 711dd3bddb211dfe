"""Finds the checkpoint to resume from: the requested one, or the newest intact one."""

import json
import logging
from pathlib import Path

from hf_memopt.errors import InputError, one_line
from hf_memopt.files import check_links
from hf_memopt.trainer.checkpoints.manifest import manifest_fault
from hf_memopt.trainer.checkpoints.sharded_states import STATES_FOLDER

logger = logging.getLogger(__name__)


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
    if not (checkpoint / "trainer_state.json").is_file():
        return "no trainer_state.json"
    for pattern in ("*config.json", "*.index.json", "memory_state.json"):  # read when a run resumes
        for file in sorted(checkpoint.glob(pattern)):
            if fault := _json_fault(file):
                return fault
    if fault := _state_fault(checkpoint / "trainer_state.json"):
        return fault
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


def _faults_of_states(checkpoint: Path):
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


def _json_fault(file: Path) -> str:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{file.name}: {one_line(error)}"
    return "" if isinstance(content, dict) else f"{file.name} holds a {type(content).__name__}, not an object"


def _state_fault(file: Path) -> str:
    from transformers import TrainerState

    try:
        state = TrainerState.load_from_json(str(file))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return f"{file.name}: {one_line(error)}"
    steps = state.global_step
    return "" if isinstance(steps, int) and steps >= 0 else f"{file.name}: global_step is {steps!r}"


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
    import zipfile

    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        return f"{file.name}: {one_line(error)}"
    return "" if any(name.endswith("data.pkl") for name in names) else f"{file.name} is not what torch.save writes"
