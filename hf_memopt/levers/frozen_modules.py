"""Run frozen modules under no_grad wherever none of their inputs requires a gradient.

Adapters and activation checkpointing make the embeddings' outputs require gradients (enable_input_require_grads),
those of a frozen vision tower too. Autograd then saves all activations of the tower for gradients that nobody uses.
"""

import functools

import torch
from torch.utils._pytree import tree_leaves

from hf_memopt.levers.replaced import replace


def run_frozen_without_grad(model: torch.nn.Module) -> None:
    """Run a model's outermost frozen modules under no_grad.

    Decided at each call: a module with an input that requires a gradient runs as usual.
    """
    for module in _outermost_frozen(model):
        replace(module, "forward", _without_grad(module, module.forward))


def _outermost_frozen(module: torch.nn.Module):
    """Yield the outermost modules that have weights, none of them trainable."""
    weights = list(module.parameters())
    listed = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)  # never called themselves
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
            or any(weight.requires_grad for weight in module.parameters())  # unfrozen since
        )
        if needed:
            return forward(*args, **kwargs)
        with torch.no_grad():
            return forward(*args, **kwargs)

    return run
