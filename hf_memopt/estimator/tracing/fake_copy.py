"""A copy of a model, real or fake, on fake tensors, with fewer layers."""

import copy
from collections.abc import Iterator

import torch

from hf_memopt.estimator.tracing.extrapolate import count_layers, with_depth
from hf_memopt.estimator.tracing.model import traceable_dtype
from hf_memopt.levers.replaced import put_back


def fake_copy(model: torch.nn.Module, lists: list[torch.nn.ModuleList], depth: int) -> torch.nn.Module:
    """A copy of a model under the fake tensor mode.

    Args:
        lists: the model's lists of repeated layers.
        depth: how many layers of each list the copy has, from the first on.
    """
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers(), *_unregistered(model)):
        memo[id(tensor)] = _fake(tensor)
    if depth < count_layers(model.config):
        for config in {
            id(module.config): module.config for module in model.modules() if hasattr(module, "config")
        }.values():
            if getattr(config, "num_hidden_layers", None) == count_layers(model.config):
                memo[id(config)] = with_depth(config, depth)
        for layers in lists:
            memo[id(layers)] = torch.nn.ModuleList(copy.deepcopy(layer, memo) for layer in layers[:depth])
    copied = copy.deepcopy(model, memo)
    put_back(copied)  # deepcopy does not copy functions: replaced forwards would run the original's modules
    return copied


def _unregistered(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors in plain dicts of its modules, where peft keeps SHiRA's indices and the ids of virtual tokens."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, dict):
                yield from (tensor for tensor in value.values() if type(tensor) is torch.Tensor)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=traceable_dtype(tensor.dtype))
    if not isinstance(tensor, torch.nn.Parameter):
        return empty
    weight = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    state = getattr(tensor, "quant_state", None)
    if state is not None:  # a 4-bit weight of bitsandbytes
        names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")
        vars(weight).update({name: getattr(tensor, name) for name in names}, quant_state=_fake_state(state))
    return weight


def _fake_state(state):
    state = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(state, name, torch.empty(value.size(), dtype=value.dtype))
    if getattr(state, "state2", None) is not None:
        state.state2 = _fake_state(state.state2)
    return state
