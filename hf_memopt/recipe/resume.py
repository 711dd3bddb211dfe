"""Which checkpoint a run goes on from, and whether that checkpoint is whole."""

import json
from pathlib import Path

from hf_memopt.errors import InputError, one_line
from hf_memopt.trainer.sharded_states import FOLDER

_FRESH = {"no", "none", "false"}


def checkpoint_to_resume(args) -> str | None:
    """The checkpoint to go on from: the one named, or the last one in output_dir; None to start afresh.

    `--resume_from_checkpoint no` starts afresh although there are checkpoints.

    Raises:
        InputError: the checkpoint is missing or was not written to its end.
    """
    from transformers.trainer_utils import get_last_checkpoint

    named = args.resume_from_checkpoint
    if named is not None and str(named).lower() in _FRESH:
        return None
    if named is None or str(named).lower() == "true":
        last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
        if last is None and named is not None:
            raise InputError(f"resume_from_checkpoint: {args.output_dir} holds no checkpoint-N folder")
        named = last
    if named is not None:
        _check_whole(Path(named), args)
    return named


def _check_whole(checkpoint: Path, args) -> None:
    if not checkpoint.is_dir():
        raise InputError(f"resume_from_checkpoint: {checkpoint} is not a folder")
    fault = _fault(checkpoint, args)
    if not fault:
        return
    others = [
        folder.name
        for folder in checkpoint.parent.glob("checkpoint-*")
        if folder != checkpoint and folder.is_dir() and not _fault(folder, args)
    ]
    newest = max(others, key=lambda name: int(name.rpartition("-")[2]), default=None)
    instead = f"name {newest} with --resume_from_checkpoint" if newest else "start afresh with another output_dir"
    raise InputError(f"{checkpoint} is half-written ({fault}): delete it and run again, or {instead}")


def _fault(checkpoint: Path, args) -> str:
    """What is missing or cut short in a checkpoint folder; "" where it is whole."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no trainer_state.json"
    except ValueError as error:
        return f"trainer_state.json: {one_line(error)}"
    if any(checkpoint.glob("global_step*")) or any(checkpoint.glob("pytorch_model_fsdp*")):
        return ""  # an engine's own folders; the engine checks them when it loads
    weights = [*checkpoint.glob("model*.safetensors"), *checkpoint.glob("adapter_model.safetensors")]
    if not weights:
        return "no model.safetensors or adapter_model.safetensors"
    for file in weights:
        if fault := _safetensors_fault(file):
            return fault
    for index in checkpoint.glob("*.safetensors.index.json"):
        missing = set(json.loads(index.read_text())["weight_map"].values()) - {file.name for file in weights}
        if missing:
            return f"no {min(missing)}"
    states = f"{FOLDER}/.metadata" if (checkpoint / FOLDER).is_dir() else "optimizer.pt"
    needed = [] if args.save_only_model else [states, "scheduler.pt"]
    return next((f"no {name}" for name in needed if not (checkpoint / name).is_file()), "")


def _safetensors_fault(file: Path) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"{file.name}: {one_line(error)}"
