"""Find the checkpoint that a recipe resumes from."""

import shutil
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.files import is_there
from hf_memopt.trainer.checkpoints.intact import find_checkpoint, newest_intact

_FRESH = {"no", "none", "false"}
# What a recipe writes into output_dir when it has come to its end, beside the trained weights.
_REPORT = "memory_report.json"
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors", "model.safetensors.index.json")


def keep_finished_run(recipe, training: dict[str, Any]) -> dict[str, Any]:
    """The TrainingArguments fields of a run that replaces no finished one unasked: it starts afresh where it may.

    A run that was interrupted resumes; a finished one only where the command says so.

    Args:
        recipe: the RecipeArguments.

    Raises:
        InputError: output_dir holds a finished run, and the command says neither to continue nor to replace it.
    """
    output_dir, resumes = training["output_dir"], str(training.get("resume_from_checkpoint") or "no").lower()
    if recipe.dry_run or resumes not in _FRESH or not _is_finished(Path(output_dir)):
        return training
    if not recipe.overwrite:
        raise InputError(
            f"output_dir={output_dir} holds a finished run: name another folder, continue it with "
            "--resume_from_checkpoint true, or replace it with --overwrite"
        )
    return training | {"resume_from_checkpoint": "no"}


def remove_finished_run(output_dir: str) -> None:
    """Take away what the run that follows would otherwise be mistaken for: the report and the checkpoints."""
    folder = Path(output_dir)
    if _is_finished(folder):
        (folder / _REPORT).unlink()
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)


def _is_finished(folder: Path) -> bool:
    return is_there(folder / _REPORT) and any(file for kind in _WEIGHTS for file in folder.glob(kind))


def checkpoint_to_resume(args) -> str | None:
    """The checkpoint that is named, or the newest intact one in output_dir; None to start afresh.

    `--resume_from_checkpoint no` starts afresh although there are checkpoints.

    Raises:
        InputError: the checkpoint is missing or damaged.
    """
    named = args.resume_from_checkpoint
    if named is not None and str(named).lower() in _FRESH:
        return None
    if named is None:
        newest = newest_intact(args.output_dir, args.save_only_model)
        return newest and str(newest)
    requested = True if str(named).lower() == "true" else named
    return find_checkpoint(requested, args.output_dir, args.save_only_model)
