"""Samples of video models as one batch, with any number and size of clips: padded, or packed into one row."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import inner_model

TOKENS = ("input_ids", "labels", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass(frozen=True)
class VideoCollator:
    """Pads tokens to the longest sample, and joins media into the tensors that the model takes.

    Causal attention never looks at the padding on the right, so no mask is needed; transformers would expand one to
    (tokens × tokens), which grows with the square of the frames.

    Args:
        pad_token_id: of the tokenizer.
        pad_to_multiple_of: tokens.
        separate_media: keep each sample's media to itself, under "media" (a list of dictionaries). VideoTrainer joins
            them when the batch runs, which lets it split a micro-batch between samples.
        attention_mask: add one nevertheless, for attention that is not causal.
        lengths: add each sample's tokens, from which VideoTrainer packs the batch into one row.
    """

    pad_token_id: int
    pad_to_multiple_of: int = 8
    separate_media: bool = False
    attention_mask: bool = False
    lengths: bool = False

    def __call__(self, samples: list[dict]) -> dict[str, Any]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        padding = {"input_ids": self.pad_token_id, "labels": IGNORED}
        batch: dict[str, Any] = {
            name: torch.stack(
                [
                    torch.nn.functional.pad(sample[name], (0, length - len(sample[name])), value=padding.get(name, 0))
                    for sample in samples
                ]
            )
            for name in TOKENS
            if name in samples[0]
        }
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        if self.attention_mask:  # from the lengths: pad_token_id may also be the end-of-text token
            batch["attention_mask"] = (torch.arange(length)[None] < lengths[:, None]).long()
        if self.lengths:
            batch["lengths"] = lengths
        media = [{name: value for name, value in sample.items() if name not in TOKENS} for sample in samples]
        return batch | ({"media": media} if self.separate_media else join(media))


def join(parts: list[dict], in_one_sample: bool = False) -> dict[str, Any]:
    """The media tensors of several media, or of several samples, as the model takes them.

    Patches and frames are concatenated. Videos of unequal length that a model takes as (videos, frames, …) become a
    list. A model that takes (samples, frames, …), recognized by its `pixel_attention_mask`, gets one row per sample,
    padded with zeros, which it drops. One that takes all patches in one row has `target_sizes` beside them.

    Args:
        in_one_sample: the parts are media of one sample.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    row_per_sample = "pixel_attention_mask" in names  # SmolVLM
    one_row = names.keys() & {"target_sizes", "target_sizes_videos"}  # MiniCPM-V
    joined = {}
    for name in names:
        held = [part[name] for part in parts if name in part]
        tensors = [tensor for each in held for tensor in (each if isinstance(each, list) else [each])]
        if one_row and name.startswith("pixel_values"):
            joined[name] = torch.cat(tensors, dim=-1)
        elif row_per_sample and in_one_sample:
            joined[name] = torch.cat(tensors, dim=1)
        elif row_per_sample:
            blank = tensors[0].new_zeros(1, 1, *tensors[0].shape[2:])  # a sample without media
            joined[name] = _pad_and_concatenate([part.get(name, blank) for part in parts])
        elif len({tensor.shape[1:] for tensor in tensors}) == 1:
            joined[name] = torch.cat(tensors)
        elif name == "pixel_values_videos" or "image_sizes" not in names:
            joined[name] = tensors  # without sizes, padding would be taken for tiles
        else:
            joined[name] = _pad_and_concatenate(tensors)  # images split into unequal numbers of tiles
    return joined


def _pad_and_concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenated along the first dimension, zero-padded along the second."""
    length = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([_pad_rows(tensor, length) for tensor in tensors])


def _pad_rows(tensor: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)) if missing else tensor


# Model types whose packed batches have the loss and the gradients of padded ones: tests/video/test_video_packing.py.
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
        raise InputError(
            f"packing: not tested for models of the type {config.model_type}, only for {', '.join(PACKED)}; leave it "
            "out"
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
