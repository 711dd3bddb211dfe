"""Functions of modules that levers replace, so that a copy of a model can be had without them."""

from collections.abc import Callable

import torch


def replace(module, name: str, function: Callable) -> None:
    """Set a function of a module in the place of its class's own."""
    function.of_lever = True
    setattr(module, name, function)


def put_back(module: torch.nn.Module) -> None:
    """Give a module and all within it their own functions again."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if getattr(value, "of_lever", False):
                delattr(part, name)
