"""Where saved tensors pass: what autograd keeps of a model's forward pass for its backward pass."""

import functools
from typing import Any, Protocol

import torch

from hf_memopt.levers.replaced import replace


class Keeper(Protocol):
    """Keeps saved tensors in a form of its own."""

    def begin(self, model: torch.nn.Module, inputs: tuple) -> None:
        """Called before every forward pass with the model and the tensors it is given."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """What is kept instead of a tensor."""

    def end(self) -> None:
        """Called after every forward pass, also one that failed."""

    def unpack(self, kept: Any) -> torch.Tensor:
        """The tensor again, in the backward pass; called as often as it is needed."""


def save_through(model: torch.nn.Module, keeper: Keeper) -> None:
    """Have a model's saved tensors pass through a keeper while it trains; its `forward` is replaced.

    What activation checkpointing keeps of a layer, its inputs, passes here too: torch saves them like any other.
    """
    forward = model.forward

    @functools.wraps(forward)  # the Trainer reads the signature
    def saving(*args, **kwargs):
        if not (model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        keeper.begin(model, tuple(tensors))
        try:
            with torch.autograd.graph.saved_tensors_hooks(_detached(keeper.pack), keeper.unpack):
                return forward(*args, **kwargs)
        finally:
            keeper.end()

    saving.keeper = keeper
    replace(model, "forward", saving)


def _detached(pack):
    """A tensor that knows how it was computed would be held by what it holds: a graph that is given up would stay."""
    return lambda tensor: pack(tensor.detach() if tensor.requires_grad else tensor)


def place(tensor: torch.Tensor) -> tuple:
    """Where a tensor's elements lie, and in which version: alike for views of the same elements in the same order."""
    order = () if is_dense(tensor) else (tensor.shape, tensor.stride())
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version, order


def storages_of(model: torch.nn.Module) -> set[int]:
    """The storages of a model's weights and buffers, by which saved ones and views of them are told."""
    return {weight.untyped_storage()._cdata for weight in (*model.parameters(), *model.buffers())}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
