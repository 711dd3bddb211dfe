"""A sharded checkpoint as one model that from_pretrained reads, without the devices that wrote it."""

import pickle
import shutil
import tempfile
from pathlib import Path

from hf_memopt.errors import InputError, as_input_error
from hf_memopt.trainer import manifest

_FSDP = "pytorch_model_fsdp_0"  # accelerate's FSDP_MODEL_NAME, of the first model
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "merges.*")  # configuration and tokenizer
_OF_THE_RUN = (
    "trainer_state.json",
    "training_args.json",
    "model.safetensors.index.json",
    manifest.FILE,
    "memory_state.json",
)
_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    AssertionError,
    IndexError,
    EOFError,
    pickle.UnpicklingError,
)


def consolidate(checkpoint: str | Path, directory: str | Path, trusted: bool = False) -> list[str]:
    """Write the whole weights of a ZeRO or FSDP2 checkpoint as safetensors, with configuration and tokenizer.

    Needs host memory for twice all weights in fp32, and no device.

    Args:
        checkpoint: a `checkpoint-N` folder, or what a final save_model() left.
        directory: a folder to write to; it must not be there yet, or be empty.
        trusted: the checkpoint is one's own. ZeRO's and FSDP's shards are pickles, and reading a pickle runs what is
            in it.

    Returns:
        The files' names.

    Raises:
        InputError: no sharded checkpoint, not said to be trusted, or one that cannot be read.
    """
    source, target = Path(checkpoint).expanduser(), Path(directory).expanduser().resolve()
    merge = _reader(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is there already: name a folder that is empty or new")
    if not trusted:
        raise InputError(
            f"{source} holds pickles, and reading them runs what is in them: add --trusted if the "
            "checkpoint is your own"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder) / "model"
        made.mkdir()
        with as_input_error(f"{source} cannot be read", *_FAILURES):
            merge(source, made)
        for pattern in _BESIDE:
            for file in source.glob(pattern):
                if file.name not in _OF_THE_RUN and not (made / file.name).exists():
                    shutil.copy2(file, made)
        if target.exists():
            target.rmdir()
        made.rename(target)
    return sorted(file.name for file in target.iterdir())


def _reader(source: Path):
    """The function that merges such a checkpoint."""
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
    """DeepSpeed's own writer fails on tied weights, which are one tensor under two names: safetensors wants one.
    ZeRO-1 and 2 give all weights as views of one tensor, of which it wants the parts."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from huggingface_hub import save_torch_state_dict

    apart: dict = {}  # a weight under two names stays one
    merged = get_fp32_state_dict_from_zero_checkpoint(str(source))
    for name, weight in merged.items():
        merged[name] = apart.setdefault((weight.data_ptr(), weight.shape), weight.clone())
    save_torch_state_dict(merged, target)


def _merge_fsdp(source: Path, target: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(source / _FSDP), str(target), safe_serialization=True)
