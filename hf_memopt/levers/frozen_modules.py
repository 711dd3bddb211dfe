"""Frozen modules run outside autograd wherever nothing that they are given needs a gradient.

Adapters and activation checkpointing make embeddings require gradients (enable_input_require_grads), a vision tower's
too; from there on autograd saves every activation of the tower, for gradients that nobody takes.
"""

import functools

import torch
from torch.utils._pytree import tree_leaves

from hf_memopt.levers.replaced import replace


def run_frozen_without_grad(model: torch.nn.Module) -> None:
    """Run a model's outermost frozen modules without saving anything, in the calls that have no use for gradients.

    Asked at every call: a module that gets something that needs a gradient runs as always.
    """
    for module in _outermost_frozen(model):
        replace(module, "forward", _without_grad(module, module.forward))


def _outermost_frozen(module: torch.nn.Module):
    """Modules with weights none of which is trained, whose parents have some that are, or are no more than lists."""
    weights = list(module.parameters())
    listed = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)  # which are never called
    if weights and not listed and not any(weight.requires_grad for weight in weights):
        yield module
    elif weights:
        for child in module.children():
            yield from _outermost_frozen(child)


def _without_grad(module, forward):
    @functools.wraps(forward)
    def run(*args, **kwargs):
        needed = torch.is_grad_enabled() and (
            any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))
            or any(weight.requires_grad for weight in module.parameters())  # thawed since
        )
        if needed:
            return forward(*args, **kwargs)
        with torch.no_grad():
            return forward(*args, **kwargs)

    return run
