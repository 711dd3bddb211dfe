"""Packed batches of video models: samples in a row without padding, each with its own positions."""

import inspect
from typing import Any

import torch

from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import inner_model
from hf_memopt.video.collator import TOKENS

# Model types whose packed batches have the loss and the gradients of padded ones: tests/test_video_packing.py.
PACKED = (
    "internvl",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "video_llama_3",
)
_ATTENTION = {"full_attention", "sliding_attention"}


def check_packing(config) -> None:
    """Refuse models whose samples would not be kept apart in a row.

    Raises:
        InputError: names the model type.
    """
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ()) - _ATTENTION
    if config.model_type not in PACKED:
        tested = ", ".join(PACKED)
        raise InputError(
            f"packing: not tested for models of the type {config.model_type}, only for {tested}; leave it out"
        )
    if layer_types:
        raise InputError(
            f"packing: layers of the type {min(layer_types)} ({text.model_type}) carry one sample over into the next; "
            "leave it out"
        )


def pack(batch: dict[str, Any], lengths: torch.Tensor, model) -> dict[str, Any]:
    """A padded batch as one row.

    From positions that start again transformers' attention keeps samples apart: by a block-diagonal mask, or as
    sequences of their own in flash attention, which does that for a single row only (5.23,
    modeling_flash_attention_utils._is_packed_sequence).

    Args:
        batch: of VideoCollator, its media joined; on the host.
        lengths: tokens of each sample, (samples,).
        model: one of PACKED, possibly peft's around it.

    Returns:
        The batch with `position_ids`: (1, tokens), or where the model has multimodal positions (4, 1, tokens), those
        within the sample and then the model's own in time, height and width.
    """
    places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    is_token = places < lengths[:, None]
    packed = {name: value[is_token][None] if name in TOKENS else value for name, value in batch.items()}
    positions = places[is_token][None]
    # The first token of a sample would be predicted from the sample before it.
    packed["labels"] = packed["labels"].masked_fill(positions == 0, IGNORED)
    multimodal = next((part for part in inner_model(model).modules() if hasattr(part, "get_rope_index")), None)
    if multimodal is not None:
        positions = torch.cat([positions[None], _rope_positions(multimodal, batch, is_token)])
    return packed | {"position_ids": positions}


def _rope_positions(model, batch: dict[str, Any], is_token: torch.Tensor) -> torch.Tensor:
    """Positions in time, height and width that the model itself would compute for each sample, (3, 1, tokens)."""
    names = inspect.signature(model.get_rope_index).parameters.keys() & batch.keys()
    if not any(name.endswith("grid_thw") for name in names):  # text alone, as the model's forward counts it
        return (is_token.cumsum(-1) - 1)[is_token].expand(3, 1, -1)
    positions, _ = model.get_rope_index(**{name: batch[name] for name in names}, attention_mask=is_token.long())
    return positions[:, is_token][:, None]
