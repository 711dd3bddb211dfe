"""State that a user's own loss keeps on the trainer: numbers are restored where a pass runs again, more is refused."""

import dis
import types
from functools import cache
from typing import Any

import numpy
import torch

from hf_memopt.trainer.step.known_code import is_known

_DEEPEST = 4  # levels of containers and objects that are looked into


def numbers(trainer) -> dict[str, Any]:
    """The numbers among the user's own attributes: counters and running means."""
    return {name: value for name, value in _own(trainer).items() if isinstance(value, bool | int | float)}


def fingerprint(trainer) -> dict[str, Any]:
    """Fingerprint the user's own attributes that are no numbers: a value that changes when they do."""
    counted = numbers(trainer)
    return {name: _print(value, _DEEPEST) for name, value in _own(trainer).items() if name not in counted}


def _own(trainer) -> dict[str, Any]:
    stored = frozenset().union(*(_stored_names(kind) for kind in type(trainer).__mro__ if is_known(kind)))
    return {name: value for name, value in vars(trainer).items() if name not in stored}


@cache
def _stored_names(kind: type) -> frozenset[str]:
    """Attributes that a class's methods assign: read from their code, since there is no list of them."""
    names: set[str] = set()
    codes = [value.__code__ for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    while codes:
        code = codes.pop()
        names.update(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names)


def _print(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        # A sum as well: writes through `.data` leave the version as it is.
        wide = torch.float32 if value.device.type == "mps" else torch.float64
        summed = value.numel() and not value.is_complex()
        return id(value), value._version, float(value.detach().sum(dtype=wide)) if summed else 0.0
    if isinstance(value, torch.nn.Module):
        return [_print(tensor, 0) for tensor in (*value.parameters(), *value.buffers())]
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, str | bytes | bool | int | float | None):
        return value
    if depth == 0 or is_known(type(value)):
        return id(value)
    if isinstance(value, dict):
        return [(id(key), _print(inner, depth - 1)) for key, inner in value.items()]
    if hasattr(value, "__len__") and hasattr(value, "__iter__"):
        return [_print(inner, depth - 1) for inner in value]
    return {name: _print(inner, depth - 1) for name, inner in getattr(value, "__dict__", {}).items()}
