"""A copy of a model, real or fake, on fake tensors, with fewer layers."""

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memopt.estimator.tracing.extrapolate import read_config, with_depth
from hf_memopt.estimator.tracing.fake_quantization import expert_state, quantization_method, traceable_dtype
from hf_memopt.estimator.tracing.quantized_linear import stand_in
from hf_memopt.levers.replaced import put_back

Memo = dict[int, Any]  # id -> copy, as copy.deepcopy() keeps it


def fake_copy(model: torch.nn.Module, lists: list[torch.nn.ModuleList], depth: int, memo: Memo) -> torch.nn.Module:
    """A copy of a model under the fake tensor mode.

    Args:
        lists: the model's lists of repeated layers; empty where it keeps all layers.
        depth: how many layers of each list the copy has, from the first on.
        memo: what is copied already; gets what is copied here.
    """
    for tensor in (*model.parameters(), *model.buffers(), *_unregistered(model)):
        if id(tensor) not in memo:
            memo[id(tensor)] = fake_tensor(tensor)
    memo.update(_quantized_layers(model, memo))
    if lists and depth < len(lists[0]):
        for config in {
            id(module.config): module.config for module in model.modules() if hasattr(module, "config")
        }.values():
            if hasattr(config, "get_text_config") and getattr(config, "num_hidden_layers", None) == len(lists[0]):
                memo[id(config)] = with_depth(config, depth)
        for layers in lists:
            if id(layers) not in memo:
                memo[id(layers)] = torch.nn.ModuleList(copy.deepcopy(layer, memo) for layer in layers[:depth])
                memo[id(layers)].repeats = True  # see segments.repeated_layers()
    copied = copy.deepcopy(model, memo)
    put_back(copied)  # deepcopy does not copy functions: replaced forwards would run the original's modules
    _rebind_modules(copied, memo)
    return copied


def _unregistered(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors in plain attributes of its modules, and in dicts, where peft keeps SHiRA's indices and the ids of
    virtual tokens."""
    for module in model.modules():
        for value in vars(module).values():
            if type(value) is torch.Tensor:
                yield value
            elif isinstance(value, dict):
                yield from (tensor for tensor in value.values() if type(tensor) is torch.Tensor)


def _quantized_layers(model: torch.nn.Module, memo: dict[int, object]) -> dict[int, object]:
    """Copies of what deepcopy would leave real: layers of packages whose kernels take no fake tensors, and the states
    in which bitsandbytes' layers keep weight and scales from their first forward on."""
    quantization = getattr(read_config(model), "quantization_config", None)
    method = quantization_method(quantization)
    copies: dict[int, object] = {}
    for module in model.modules():
        if method and (layer := stand_in(module, quantization, method)) is not None:
            copies[id(module)] = layer
        weight = getattr(module, "weight", None)
        if (state := getattr(weight, "quant_state", None)) is not None:  # a 4-bit layer holds it, too, once it has run
            copies[id(state)] = memo[id(weight)].quant_state
        if (state := expert_state(module)) is not None:
            copies[id(state)] = _fake_state(state)
        state = getattr(module, "state", None)
        if type(state).__name__ == "MatmulLtState":
            tensors = {name: value for name, value in vars(state).items() if isinstance(value, torch.Tensor)}
            copies |= {id(value): fake_tensor(value) for value in tensors.values()}
            if "CB" in tensors:
                copies[id(tensors["CB"])] = memo[id(module.weight)].data
    return copies


def _rebind_modules(copied: torch.nn.Module, memo: Memo) -> None:
    """Have functions that libraries set on modules (TRL's fused head, accelerate's autocast, hooks) use the copies of
    the modules that their closures hold."""
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, dict):  # of hooks
                value.update({key: rebind(hook, memo) for key, hook in value.items() if callable(hook)})
            elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                vars(module)[name] = rebind(value, memo)


def rebind(value, memo: Memo):
    """A function that holds copies where it held originals: as the object that it is bound to, in its closure, or as
    arguments of a partial; other values as they are."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        bound = types.MethodType(rebind(value.__func__, memo), memo.get(id(value.__self__), value.__self__))
        return bound if bound != value else value
    if isinstance(value, functools.partial):
        arguments = [rebind(argument, memo) for argument in value.args]
        keywords = {name: rebind(argument, memo) for name, argument in value.keywords.items()}
        return functools.partial(rebind(value.func, memo), *arguments, **keywords)
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _with_closure(value, memo)
    return value


def _with_closure(function: types.FunctionType, memo: Memo) -> types.FunctionType:
    memo[id(function)] = function  # a function may hold itself
    cells, changed = [], False
    for cell in function.__closure__:
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            cells.append(cell)
            continue
        rebound = rebind(content, memo)
        changed = changed or rebound is not content
        cells.append(types.CellType(rebound) if rebound is not content else cell)
    if not changed:
        return function
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    vars(copied).update({name: rebind(value, memo) for name, value in vars(function).items()})
    memo[id(function)] = copied
    return copied


def fake_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same size; a parameter, quantized or not, for a parameter."""
    if is_traceable_wrapper_subclass(tensor):  # torchao's quantized weights
        names, settings = tensor.__tensor_flatten__()
        inner = {name: fake_tensor(getattr(tensor, name)) for name in names}
        empty = type(tensor).__tensor_unflatten__(inner, settings, tensor.size(), tensor.stride())
    else:
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=traceable_dtype(tensor.dtype))
    if not isinstance(tensor, torch.nn.Parameter):
        return empty
    weight = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    if getattr(tensor, "streamed_on_load", False):  # levers.streamed_loading
        weight.streamed_on_load = True
    if hasattr(tensor, "has_fp16_weights"):  # an 8-bit weight of bitsandbytes
        codes = None if tensor.CB is None else weight.data
        scales = None if tensor.SCB is None else fake_tensor(tensor.SCB)
        vars(weight).update(CB=codes, SCB=scales, has_fp16_weights=tensor.has_fp16_weights)
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
