"""Hooks on the tensors that autograd saves in a model's forward pass for its backward pass."""

import functools
from typing import Any, Protocol

import torch

from hf_memopt.levers.replaced import replace


class Keeper(Protocol):
    """Stores saved tensors in another form or place."""

    def begin(self, model: torch.nn.Module, inputs: tuple) -> None:
        """Called before every forward pass with the model and its input tensors."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what to store instead of a tensor."""

    def end(self) -> None:
        """Called after every forward pass, including one that raised."""

    def unpack(self, saved: Any) -> torch.Tensor:
        """Restore the tensor in the backward pass; may be called several times."""


def save_through(model: torch.nn.Module, keeper: Keeper) -> None:
    """Pass a model's saved tensors through a keeper while it trains, by replacing its `forward`.

    Includes the layer inputs that activation checkpointing keeps: torch saves them like any other tensor.
    """
    forward = model.forward

    @functools.wraps(forward)  # the Trainer reads the signature
    def saving(*args, **kwargs):
        if not (model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        keeper.begin(model, tuple(tensors))
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: keeper.pack(detached(tensor)), keeper.unpack):
                return forward(*args, **kwargs)
        finally:
            keeper.end()

    saving.keeper = keeper
    replace(model, "forward", saving)


def location(tensor: torch.Tensor) -> tuple:
    """A key that is equal for views of the same elements, in the same order and version."""
    order = () if is_dense(tensor) else (tensor.shape, tensor.stride())
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version, order


def weight_storages(model: torch.nn.Module) -> set[int]:
    """The storages of a model's weights and buffers, which identify saved weights and views of them."""
    return {weight.untyped_storage()._cdata for weight in (*model.parameters(), *model.buffers())}


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements are contiguous in memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its grad_fn, which would form a reference cycle with what saves it: an abandoned graph would
    never be freed."""
    return tensor.detach() if tensor.requires_grad else tensor
