"""Functions that levers replace on modules, marked so that a copy of a model can be made without them."""

from collections.abc import Callable

import torch


def replace(module, name: str, function: Callable) -> None:
    """Override a method on one module; its class stays as it is."""
    function.of_lever = True
    function.covers = vars(module).get(name)  # another override, such as TRL's fused head
    setattr(module, name, function)


def put_back(module: torch.nn.Module) -> None:
    """Remove all overrides of levers from a module and its submodules."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if not getattr(value, "of_lever", False):
                continue
            while getattr(value, "of_lever", False):
                value = value.covers
            delattr(part, name)
            if value is not None:
                setattr(part, name, value)
