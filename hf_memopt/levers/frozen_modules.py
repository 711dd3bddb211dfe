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
    trained: dict[torch.nn.Module, bool | None] = {}
    _note_trained(model, trained)
    for module in _outermost_frozen(model, trained):
        replace(module, "forward", _without_grad(module, module.forward))


def _outermost_frozen(module: torch.nn.Module, trained: dict[torch.nn.Module, bool | None]):
    """Yield the outermost modules that have weights, none of them trainable."""
    listed = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)  # never called themselves
    if trained[module] is False and not listed:
        yield module
    elif trained[module] is not None:
        for child in module.children():
            yield from _outermost_frozen(child, trained)


def _note_trained(module: torch.nn.Module, trained: dict[torch.nn.Module, bool | None]) -> bool | None:
    """Note of a module and of each in it whether a weight is trained; None where there are no weights.

    Each is looked at once: to list the weights below every module anew took a twentieth of a trace with adapters.
    """
    if module not in trained:
        flags = [weight.requires_grad for weight in module.parameters(recurse=False)]
        flags += [flag for child in module.children() if (flag := _note_trained(child, trained)) is not None]
        trained[module] = any(flags) if flags else None
    return trained[module]


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
