"""Splits micro-batches into chunks of samples, padding included, so that the chunks' gradients add up."""

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from hf_memopt.errors import InputError

_BATCH_KEYS = ("input_ids", "inputs_embeds", "decoder_input_ids", "labels", "attention_mask", "input_features")


class RowLayout:
    """A batch in which every tensor has one row per sample, as most collators make it."""

    def count(self, inputs: Mapping[str, Any]) -> int:
        """Samples in a batch."""
        return count_rows(inputs)

    def chunk(self, inputs: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The samples from `start` up to, but not including, `stop`.

        Raises:
            InputError: a value does not have one row per sample (several samples packed into one row, patches of
                several images in one tensor).
        """
        samples = self.count(inputs)
        if (start, stop) == (0, samples):
            return dict(inputs)
        return {name: self._slice(name, value, samples, start, stop) for name, value in inputs.items()}

    def _slice(self, name: str, value: Any, samples: int, start: int, stop: int) -> Any:
        if isinstance(value, Mapping):
            return {key: self._slice(f"{name}.{key}", inner, samples, start, stop) for key, inner in value.items()}
        is_array = isinstance(value, numpy.ndarray) and value.ndim
        if is_array or isinstance(value, list | tuple):
            if len(value) != samples:
                what = f"the shape {value.shape}" if is_array else f"{len(value)} entries"
                raise _cannot_split(name, what, samples)
            return value[start:stop]
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        return self._slice_rows(name, value, samples, start, stop)

    def _slice_rows(self, name: str, value: torch.Tensor, samples: int, start: int, stop: int) -> torch.Tensor:
        # Multimodal rotary embeddings: (3 or 4 axes, samples, tokens). Checked first, since samples may equal axes.
        if "position_ids" in name and value.dim() == 3:
            if value.shape[1] != samples:
                raise _cannot_split(name, f"the shape {tuple(value.shape)}", samples)
            return value[:, start:stop]
        if value.shape[0] == samples:
            return value[start:stop]
        if value.shape[0] == 1:  # one row shared by all samples
            return value
        raise _cannot_split(name, f"the shape {tuple(value.shape)}", samples)


class PairLayout(RowLayout):
    """TRL's preference batches: rows of all chosen answers, then of all rejected ones.

    Some tensors (`margin`, `ref_chosen_logps`) have one row per pair.
    """

    def count(self, inputs: Mapping[str, Any]) -> int:
        return count_rows(inputs) // 2

    def _slice_rows(self, name: str, value: torch.Tensor, samples: int, start: int, stop: int) -> torch.Tensor:
        if value.shape[0] == 2 * samples:
            return torch.cat([value[start:stop], value[samples + start : samples + stop]])
        return super()._slice_rows(name, value, samples, start, stop)


class KtoLayout(RowLayout):
    """TRL's KTO batches. The KL term is a mean over the micro-batch, without gradients, so chunks get all its rows."""

    def chunk(self, inputs: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        shared = {name: value for name, value in inputs.items() if name.startswith(("KL_", "ref_KL_"))}
        split = {name: value for name, value in inputs.items() if name not in shared}
        return super().chunk(split, start, stop) | shared


class UnpaddedLayout(RowLayout):
    """TRL's padding-free and packed batches: one row, in which a sample begins wherever its position is 0.

    The first label of a sample is -100 (trl 1.16, DataCollatorForLanguageModeling), so that none is lost between two.
    """

    def count(self, inputs: Mapping[str, Any]) -> int:
        return int((inputs["position_ids"] == 0).sum())

    def chunk(self, inputs: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        positions = inputs["position_ids"][0]
        bounds = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        if (start, stop) == (0, len(bounds) - 1):
            return dict(inputs)
        longest = max(
            last - first for first, last in zip(bounds[start:stop], bounds[start + 1 : stop + 1], strict=True)
        )
        chunk = {}
        for name, value in inputs.items():
            if name.startswith("cu_seq_lens"):
                chunk[name] = value[start : stop + 1] - value[start]
            elif name.startswith("max_length"):
                chunk[name] = longest
            elif isinstance(value, torch.Tensor) and value.shape[:2] == (1, len(positions)):
                cut = value[:, bounds[start] : bounds[stop]]
                chunk[name] = cut - cut[0, 0] if name == "seq_idx" else cut
            else:
                chunk[name] = value
        return chunk


def copy_batch(value: Any) -> Any:
    """A copy of a batch, which a loss may pop from and change in place."""
    if isinstance(value, Mapping):
        return type(value)({name: copy_batch(inner) for name, inner in value.items()})
    return value.clone() if isinstance(value, torch.Tensor) else value


def tensor_versions(value: Any) -> list[int]:
    """Count the writes to each tensor of a batch in place (torch's `_version`, which autograd checks too)."""
    if isinstance(value, Mapping):
        return [version for inner in value.values() for version in tensor_versions(inner)]
    return [value._version] if isinstance(value, torch.Tensor) else []


def _cannot_split(name: str, what: str, samples: int) -> InputError:
    return InputError(f"a batch of {samples} samples cannot be split: {name} has {what}; override split_batch()")


def count_rows(inputs: Mapping[str, Any]) -> int:
    """Rows of a batch: the first dimension of its tokens, else of its first tensor; 1 without tensors."""
    names = [name for name in _BATCH_KEYS if name in inputs] + list(inputs)
    sizes = [inputs[name].shape[0] for name in names if isinstance(inputs[name], torch.Tensor) and inputs[name].dim()]
    return sizes[0] if sizes else 1


def count_elements(inputs: Any) -> int:
    """Elements of all tensors of a batch, with which its activations grow."""
    if isinstance(inputs, torch.Tensor):
        return inputs.numel()
    if isinstance(inputs, Mapping):
        return sum(map(count_elements, inputs.values()))
    return sum(map(count_elements, inputs)) if isinstance(inputs, list | tuple) else 0


def count_tokens(inputs: Mapping[str, Any]) -> int:
    """Tokens in a batch, padding included; 0 without tokens."""
    tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    return tokens.shape[0] * tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else 0


def tensor_shapes(inputs: Any) -> dict[str, list[int]]:
    """The shape of every tensor of a batch, by name; empty where the batch is not a mapping."""
    if not isinstance(inputs, Mapping):
        return {}
    return {name: list(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
