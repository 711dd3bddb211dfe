"""Merges a sharded checkpoint into one that from_pretrained reads, without the devices that wrote it."""

import pickle
import shutil
import tempfile
from pathlib import Path

from hf_memopt.errors import InputError, as_input_error
from hf_memopt.files import check_links
from hf_memopt.packages import require
from hf_memopt.trainer.checkpoints.intact import MANIFEST

_FSDP = "pytorch_model_fsdp_0"  # accelerate's FSDP_MODEL_NAME, of the first model
_MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "merges.*")  # configuration and tokenizer
_RUN_FILES = (
    "trainer_state.json",
    "training_args.json",
    "model.safetensors.index.json",
    MANIFEST,
    "memory_state.json",
)
_FAILURES = (OSError, ValueError, KeyError, RuntimeError, AssertionError, IndexError, EOFError, pickle.UnpicklingError)


def consolidate(checkpoint: str | Path, directory: str | Path, trusted: bool = False) -> list[str]:
    """Write the unsharded weights of a ZeRO or FSDP2 checkpoint as safetensors, with config and tokenizer.

    Needs host memory for two fp32 copies of the weights, and no device.

    Args:
        checkpoint: a `checkpoint-N` folder, or what a final save_model() left.
        directory: an empty or new folder to write to.
        trusted: the checkpoint is your own. Shards of ZeRO and FSDP are pickles, and loading a pickle runs code in it.

    Returns:
        Names of the written files.

    Raises:
        InputError: no sharded checkpoint, `trusted` not set, or a checkpoint that cannot be read.
    """
    source, target = Path(checkpoint).expanduser(), Path(directory).expanduser().resolve()
    merge = _choose_merge(source)
    check_links(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is not an empty folder: name an empty or new one")
    if not trusted:
        raise InputError(
            f"{source} holds pickles, and reading them runs what is in them: add --trusted if the "
            "checkpoint is your own"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        merged = Path(folder) / "model"
        merged.mkdir()
        with as_input_error(f"{source} cannot be read", *_FAILURES):
            merge(source, merged)
        for pattern in _MODEL_FILES:
            for file in source.glob(pattern):
                if file.name not in _RUN_FILES and not (merged / file.name).exists():
                    shutil.copy2(file, merged)
        if target.exists():
            target.rmdir()
        merged.rename(target)
    return sorted(file.name for file in target.iterdir())


def _choose_merge(source: Path):
    """The function that merges this kind of checkpoint."""
    if (source / _FSDP).is_dir():
        return _merge_fsdp
    if (source / "latest").is_file() and list(source.glob("global_step*/*optim_states.pt")):
        return _merge_zero
    if not source.is_dir():
        raise InputError(f"{source}: no such folder")
    raise InputError(
        f"{source} has no sharded weights: neither global_step*/*optim_states.pt of ZeRO nor {_FSDP} of "
        "FSDP2; name a checkpoint-N folder"
    )


def _merge_zero(source: Path, target: Path) -> None:
    """Merge ZeRO shards with DeepSpeed, and write them with huggingface_hub.

    DeepSpeed 0.19.8's own safetensors writer fails on tied weights, and on the views of one flat tensor that ZeRO-1
    and 2 return: safetensors refuses shared storage. So every tensor is cloned, tied ones once.
    """
    require("deepspeed", f"consolidating {source}, a checkpoint of ZeRO,")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from huggingface_hub import save_torch_state_dict

    clones: dict = {}  # tied weights stay one tensor under two names
    merged = get_fp32_state_dict_from_zero_checkpoint(str(source))
    for name, weight in merged.items():
        merged[name] = clones.setdefault((weight.data_ptr(), weight.shape), weight.clone())
    save_torch_state_dict(merged, target)


def _merge_fsdp(source: Path, target: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(source / _FSDP), str(target), safe_serialization=True)
