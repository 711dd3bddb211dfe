"""Checkpoints whose weights have other names than the model's own.

transformers 5 saves models that it has rebuilt (Qwen2.5-VL, Mixtral's experts and others) under the names of the
original checkpoints. Its Trainer hands those to load_state_dict as they are, which finds none of them, says so in a
warning, and trains the weights that the model was made with.
"""

import json
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.errors import InputError


def load_renamed(model, folder: str | Path) -> bool:
    """Load a checkpoint's weights into a model if their names are not the model's; whether it was so.

    from_pretrained knows the names. It makes the weights once more, in host memory.

    Raises:
        InputError: weights are missing, for which from_pretrained would draw random numbers.
    """
    if not isinstance(model, PreTrainedModel) or not _names(Path(folder)) - model.state_dict().keys():
        return False
    loaded, info = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{folder} lacks {len(missing)} of the model's weights ({missing[0]}, …): it is of another model"
        )
    model.load_state_dict(loaded.state_dict(), strict=False)
    return True


def _names(folder: Path) -> set[str]:
    """The names of a checkpoint's weights; none where it has no file of them."""
    from safetensors import safe_open

    index, whole = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not whole.is_file():
        return set()
    with safe_open(whole, "pt") as file:
        return set(file.keys())
