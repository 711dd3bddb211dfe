"""A micro-batch cut into pieces along its samples, padding and all, so that the pieces' losses add up to its own."""

from collections.abc import Mapping
from typing import Any

import torch

from hf_memopt.errors import InputError

_FIRST = ("input_ids", "inputs_embeds", "decoder_input_ids", "labels", "attention_mask", "input_features")


def rows_of(inputs: Mapping[str, Any]) -> int:
    """Samples in a batch: the first dimension of its tokens, else of its first tensor; 1 where it holds none."""
    names = [name for name in _FIRST if name in inputs] + list(inputs)
    sizes = [inputs[name].shape[0] for name in names if isinstance(inputs[name], torch.Tensor) and inputs[name].dim()]
    return sizes[0] if sizes else 1


def elements_of(inputs: Any) -> int:
    """Elements of all tensors of a batch: what its activations grow with."""
    if isinstance(inputs, torch.Tensor):
        return inputs.numel()
    if isinstance(inputs, Mapping):
        return sum(map(elements_of, inputs.values()))
    return sum(map(elements_of, inputs)) if isinstance(inputs, list | tuple) else 0


def tokens_of(inputs: Mapping[str, Any]) -> int:
    """Tokens of a batch, padding counted; 0 where it has none."""
    tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    return tokens.shape[0] * tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else 0


def shapes_of(inputs: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shape of every tensor of a batch, by name."""
    return {name: list(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def piece_of(inputs: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The samples from `start` to before `stop` of a batch; all of it where that is all.

    Raises:
        InputError: a tensor does not have one row for each sample (tokens of several samples in one row, patches of
            several images in one list), so that it cannot be said where to cut.
    """
    rows = rows_of(inputs)
    if (start, stop) == (0, rows):
        return dict(inputs)
    return {name: _cut(name, value, rows, slice(start, stop)) for name, value in inputs.items()}


def _cut(name: str, value: Any, rows: int, part: slice) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(f"{name}.{key}", inner, rows, part) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return value[part] if len(value) == rows else value
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape[0] == rows:
        return value[part]
    if value.dim() > 1 and "position_ids" in name and value.shape[1] == rows:  # (axes, samples, tokens)
        return value[:, part]
    if value.shape[0] == 1:  # one row for all samples
        return value
    raise InputError(
        f"a batch of {rows} samples cannot be cut: {name} has the shape {tuple(value.shape)}; override split_batch()"
    )
