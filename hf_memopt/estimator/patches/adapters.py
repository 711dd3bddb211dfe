"""PEFT's adapters on fake tensors: the places where peft 0.21 asks a tensor for its value.

Each replacement allocates what the original allocates and keeps what it keeps for backward.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_memopt.estimator.patches.replacement import all_replaced, original


@contextmanager
def traceable_adapters() -> Iterator[None]:
    """Called in the fake world, before adapters are added; without peft there is nothing to replace."""
    if "peft" not in sys.modules:
        yield
        return
    update_layer = _without_mask(original(_SHIRA_UPDATE))
    with all_replaced({**_REPLACED, _SHIRA_UPDATE: update_layer}):
        yield


class _TorchWithout:
    """The torch module as one file of peft sees it, with some functions replaced."""

    def __init__(self, **replaced):
        vars(self).update(replaced)

    def __getattr__(self, name):
        return getattr(torch, name)


class _BlockDiagonal(torch.autograd.Function):
    """torch.block_diag of all blocks at once. BOFT has hidden_size / 4 of them, and torch passes them to a fake kernel
    one by one, which takes minutes for a 3B model."""

    @staticmethod
    def forward(ctx, blocks):
        ctx.shape = blocks.shape
        count, size, _ = blocks.shape
        return blocks.new_zeros(count * size, count * size)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_empty(ctx.shape)


def _without_mask(update_layer):
    """SHiRA asks a mask for the places of its ones, which are as many as the trained values."""

    def update(layer, adapter_name, mask, r, **kwargs):
        update_layer(layer, adapter_name, None, r, **kwargs)
        if mask is not None:
            count = layer.shira_weight[adapter_name].numel()
            layer.shira_indices[adapter_name] = torch.empty(2, count, dtype=torch.int)

    return update


def _shira_delta(layer, adapter: str) -> torch.Tensor:
    """SHiRA's sparse matrix, which has no storage that a fake tensor could stand for, as a dense one."""
    indices = layer.shira_indices[adapter].to(torch.int64)
    values = layer.shira_weight[adapter] * layer.scaling[adapter]
    return _Scatter.apply(values, indices, (layer.out_features, layer.in_features))


class _Scatter(torch.autograd.Function):
    """A dense matrix of sparse values that takes no memory of its own: its addition reads the values."""

    @staticmethod
    def forward(ctx, values, indices, shape):
        ctx.save_for_backward(indices)
        return values.new_empty(()).expand(shape)

    @staticmethod
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        return grad[indices[0], indices[1]], None, None


def _assign_scales(model, adapter_name: str) -> None:
    """UniLoRA counts with bincount how often each shared weight is used, for a scale per element of A and B."""
    for module in model._iter_unilora_layers():
        if adapter_name in module.unilora_indices_A:
            indices = module.unilora_indices_A[adapter_name], module.unilora_indices_B[adapter_name]
            module.update_scaling(adapter_name, *(torch.empty(index.shape) for index in indices))


_SHIRA_UPDATE = "peft.tuners.shira.layer:ShiraLayer.update_layer"
_REPLACED = {
    "peft.tuners.boft.layer:torch": _TorchWithout(unbind=lambda blocks: (blocks,), block_diag=_BlockDiagonal.apply),
    "peft.tuners.boft.layer:BOFTLayer.block_butterfly_perm": lambda layer, size, *_: torch.arange(size),
    "peft.tuners.boft.layer:BOFTLayer.perm2mat": lambda layer, order: torch.empty(len(order), len(order)),
    "peft.tuners.shira.layer:Linear.get_delta_weight": _shira_delta,
    "peft.tuners.unilora.model:UniLoraModel._assign_unilora_indices_and_scales": _assign_scales,
}
