"""Checkpoints whose weights have other names than the model's.

transformers 5 saves models whose modules it has reorganized (Qwen2.5-VL, Mixtral's experts and others) under the names
of the original checkpoints. Its Trainer (5.23) passes these to load_state_dict, which matches none, warns, and trains
the initial weights. Can go when the Trainer renames them as from_pretrained does.
"""

import json
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.errors import InputError


def load_renamed(model, folder: str | Path) -> bool:
    """Load a checkpoint's weights into a model if their names differ from the model's; True if they did.

    from_pretrained maps the names, and needs host memory for a second copy of the weights.

    Raises:
        InputError: weights are missing, which from_pretrained would initialize at random.
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
    """The names of a checkpoint's weights; empty where it has no safetensors."""
    from safetensors import safe_open

    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not single.is_file():
        return set()
    with safe_open(single, "pt") as file:
        return set(file.keys())
