"""Which checkpoint a recipe resumes from."""

from pathlib import Path

from hf_memopt.errors import InputError
from hf_memopt.trainer.intact import check_intact, newest_intact

_FRESH = {"no", "none", "false"}


def checkpoint_to_resume(args) -> str | None:
    """The checkpoint that is named, or the newest intact one in output_dir; None to start afresh.

    `--resume_from_checkpoint no` starts afresh although there are checkpoints.

    Raises:
        InputError: the checkpoint is missing or damaged.
    """
    named = args.resume_from_checkpoint
    if named is not None and str(named).lower() in _FRESH:
        return None
    if named is None or str(named).lower() == "true":
        newest = newest_intact(args.output_dir, args.save_only_model)
        if newest is None and named is not None:
            raise InputError(f"resume_from_checkpoint: {args.output_dir} holds no checkpoint-N folder")
        return newest and str(newest)
    check_intact(Path(named), args.save_only_model)
    return str(named)
