"""Samples of video models as one batch, whatever the number and size of their clips."""

from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.data.tokens import IGNORED

TOKENS = ("input_ids", "labels", "mm_token_type_ids")


@dataclass(frozen=True)
class VideoCollator:
    """Samples as one batch: tokens padded to the longest, media as the model takes them.

    Causal attention looks back alone, so that padding behind a sample needs no mask; one of all tokens by all tokens
    would grow with the square of the frames.

    Args:
        pad_token_id: of the tokenizer.
        pad_to_multiple_of: tokens.
        apart: leave each sample's media to itself (a list with one dictionary a sample, under "media"), as
            VideoTrainer wants them, which joins them when the batch runs and so can cut a batch between samples.
        masked: give the model an `attention_mask` all the same, for attention that looks ahead.
    """

    pad_token_id: int
    pad_to_multiple_of: int = 8
    apart: bool = False
    masked: bool = False

    def __call__(self, samples: list[dict]) -> dict[str, Any]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED, "mm_token_type_ids": 0}
        batch: dict[str, Any] = {
            name: torch.stack([_padded(sample[name], length, fill[name]) for sample in samples])
            for name in TOKENS
            if name in samples[0]
        }
        if self.masked:  # from the lengths: a padding token may also be the end of a text
            ends = torch.tensor([[len(sample["input_ids"])] for sample in samples])
            batch["attention_mask"] = (torch.arange(length)[None] < ends).long()
        media = [{name: value for name, value in sample.items() if name not in TOKENS} for sample in samples]
        return batch | ({"media": media} if self.apart else join(media))


def _padded(values: torch.Tensor, length: int, filling: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=filling)


def join(parts: list[dict], in_a_row: bool = False) -> dict[str, Any]:
    """The media tensors of several media, or of several samples.

    Patches and frames are laid end to end. Videos of unequal length that a model takes as (videos, frames, …) become a
    list. A model that takes (samples, frames, …) gets one row a sample, filled up with zeros, which it leaves out.

    Args:
        in_a_row: the parts are media of one sample.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    rows = "pixel_attention_mask" in names  # such a model
    joined = {}
    for name in names:
        found = [value for part in parts if name in part for value in _as_list(part[name])]
        if not rows:
            joined[name] = _end_to_end(name, found)
        elif in_a_row:
            joined[name] = torch.cat(found, dim=1)
        else:
            blank = found[0].new_zeros(1, 1, *found[0].shape[2:])  # of a sample without media
            joined[name] = _rows([part.get(name, blank) for part in parts])
    return joined


def _as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def _rows(found: list[torch.Tensor]) -> torch.Tensor:
    most = max(tensor.shape[1] for tensor in found)
    return torch.cat([_filled(tensor, most) for tensor in found])


def _end_to_end(name: str, found: list[torch.Tensor]):
    if len({tensor.shape[1:] for tensor in found}) == 1:
        return torch.cat(found)
    if name == "pixel_values_videos":
        return found
    most = max(tensor.shape[1] for tensor in found)  # images cut into unequal numbers of tiles
    return torch.cat([_filled(tensor, most) for tensor in found])


def _filled(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros up to a length along the second dimension."""
    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)
