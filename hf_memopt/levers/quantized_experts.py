"""Experts of mixture-of-experts layers in 4 bits, like the linear layers of a model that was loaded in 4 bits.

transformers 5 keeps a layer's experts in 3-dimensional parameters, which stay in 16 bits: bitsandbytes' Linear4bit
stands for nn.Linear only. Here each such parameter is quantized, and bitsandbytes' parametrization (0.50,
bitsandbytes.nn.parametrize) dequantizes it where it is read: once in a forward pass of the layer.

Autograd would keep the dequantized weights for the backward pass, which costs more than quantization saves. They are
dropped after forward and dequantized again in backward, one expert at a time where one expert was used.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.nn.utils import parametrize

from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.saved_tensors import detached

_BLOCK = 64  # elements that share a scale: bitsandbytes.functional.quantize_4bit's default
ONLY_4_BIT = (
    "quantized_experts=True applies to models that bitsandbytes loads in 4 bits: use method=qlora, or leave it out"
)


def quantize_experts(model: torch.nn.Module) -> None:
    """Quantize the frozen experts of a model whose linear layers were loaded in 4 bits, as those were.

    Args:
        model: a transformers model, or peft's around one.

    Raises:
        InputError: the model was not loaded in 4 bits, has no experts in tensors of their own, or trains all of them.
    """
    inner = inner_model(model)
    if not getattr(inner, "is_loaded_in_4bit", False):
        raise InputError(ONLY_4_BIT)
    # Modules under peft's ParamWrapper: see stays().
    adapted = {module.get_base_layer() for module in model.modules() if hasattr(module, "parameter_name")}
    trained = False
    for module in list(inner.modules()):
        for name, weight in expert_weights(module):
            if weight.requires_grad or module in adapted:
                trained = True
                continue
            setattr(module, name, quantize(weight.detach(), inner.config.quantization_config))
            dequantize_on_access(module, name)
    if any(is_quantized(module) for module in inner.modules()):
        return
    if trained:
        raise InputError(
            "quantized_experts=True: adapters train the experts, as with target_modules=all-linear; name the linear "
            "layers, as --set 'lora.target_modules=[q_proj,k_proj,v_proj,o_proj]'"
        )
    raise InputError(
        f"quantized_experts=True: {type(inner).__name__} has no experts in tensors of their own; leave it out"
    )


def is_quantized(module: torch.nn.Module) -> bool:
    """True if a module's experts are quantized, when the model was loaded or by quantize_experts()."""
    return _before in module._forward_pre_hooks.values()


def expert_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a module that hold a matrix for each expert, which blocks of 4-bit weights fit.

    All of transformers' 5.23 modules for experts have Experts in the name of their class.
    """
    if "Experts" in type(module).__name__:
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() == 3 and weight.is_floating_point() and weight.shape[-1] % _BLOCK == 0:
                yield name, weight


def stays(path: str, module: torch.nn.Module, peft_config) -> bool:
    """True if adapters will train a module of experts, or change a parameter of it.

    peft (0.21) finds parameters of parametrized modules by their whole names only, and leaves the adapters' factors
    among their parametrizations after every forward pass: such a module stays as it is.

    Args:
        path: the module's name in the model.
    """
    fields = ("target_parameters", "modules_to_save")
    trained = [name for field in fields for name in getattr(peft_config, field, None) or ()]
    paths = [f".{path}.{name}." for name, _ in expert_weights(module)]
    return any(f".{name}." in path for name in trained for path in paths)


def quantize(values: torch.Tensor, quantization) -> torch.nn.Parameter:
    """A parameter of 4-bit codes, with its bitsandbytes.functional.QuantState in `expert_state`.

    Args:
        quantization: a BitsAndBytesConfig.
    """
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(
        values.contiguous(),
        blocksize=_BLOCK,
        compress_statistics=quantization.bnb_4bit_use_double_quant,
        quant_type=quantization.bnb_4bit_quant_type,
    )
    quantized = torch.nn.Parameter(codes, requires_grad=False)
    quantized.expert_state = state
    return quantized


def dequantize_on_access(module: torch.nn.Module, name: str) -> None:
    """Have a module's parameter, which quantize() made, read as its dequantized values."""
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization

    state = vars(getattr(module, name)).pop("expert_state")
    parametrize.register_parametrization(module, name, Bnb4bitParametrization(state), unsafe=True)
    # Hooks are functions of this file and hold no module, so that copies of a model keep them.
    if not is_quantized(module):
        module.register_forward_pre_hook(_before)
        # Activation checkpointing ends its second forward by an exception.
        module.register_forward_hook(_after, always_call=True)


def _before(module: torch.nn.Module, inputs: tuple) -> None:
    """Dequantize each parameter once in this forward pass, and save none of its values for the backward pass."""
    # Only the innermost hooks are called: those around them (activation checkpointing, offloading) get the rest.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = outer or (detached, lambda saved: saved)

    def keep(tensor: torch.Tensor):
        return _find_weight(module, tensor) or pack(tensor)

    def restore(saved):
        return saved.dequantize() if isinstance(saved, _View) else unpack(saved)

    running = vars(module)["_running"] = ExitStack()
    running.enter_context(parametrize.cached())
    running.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, restore))


def _after(module: torch.nn.Module, inputs: tuple, output) -> None:
    if (running := vars(module).pop("_running", None)) is not None:  # None where an earlier hook failed
        running.close()


@dataclass(frozen=True)
class _View:
    """A view of a quantized parameter's dequantized values."""

    module: torch.nn.Module
    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def dequantize(self) -> torch.Tensor:
        weights = self.module.parametrizations[self.name]
        state = weights[0].quant_state
        size = state.shape[1:].numel()
        first = self.offset // size
        last = (self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))) // size
        values = dequantize_rows(weights.original, state, first, last + 1)
        return values.as_strided(self.shape, self.stride, self.offset - first * size)


def _find_weight(module: torch.nn.Module, tensor: torch.Tensor) -> _View | None:
    """Find the dequantized parameter that a saved tensor is a view of; None where it is no such view."""
    storage = tensor.untyped_storage()._cdata
    for name in module.parametrizations:
        # torch's own cache (2.13), which cached() fills while the module runs
        weight = parametrize._cache.get((id(module), name))
        if weight is not None and weight.untyped_storage()._cdata == storage:
            return _View(module, name, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return None


def dequantize_rows(codes: torch.Tensor, state, start: int, stop: int) -> torch.Tensor:
    """Dequantize the experts from `start` up to, but not including, `stop`: the same bits as in the whole tensor.

    Args:
        codes: all experts' codes, two in a byte.
        state: their bitsandbytes.functional.QuantState.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit

    if (start, stop) == (0, state.shape[0]):
        return dequantize_4bit(codes, state)
    size = state.shape[1:].numel()
    rows = codes.view(-1)[start * size // 2 : stop * size // 2].view(-1, 1)
    part = QuantState(
        absmax=_scales(state, start * size // state.blocksize, stop * size // state.blocksize),
        shape=torch.Size((stop - start, *state.shape[1:])),
        dtype=state.dtype,
        blocksize=state.blocksize,
        code=state.code,
        quant_type=state.quant_type,
    )
    return dequantize_4bit(rows, part)


def _scales(state, start: int, stop: int) -> torch.Tensor:
    """The scales of some blocks, of which double quantization quantizes 256 together."""
    if not state.nested:
        return state.absmax[start:stop]
    from bitsandbytes.functional import QuantState, dequantize_blockwise

    outer, size = state.state2, state.state2.blocksize
    first, last = start // size, -(-stop // size)
    some = QuantState(absmax=outer.absmax[first:last], code=outer.code, blocksize=size, dtype=outer.dtype)
    scales = dequantize_blockwise(state.absmax[first * size : last * size], some) + state.offset
    return scales.float()[start - first * size : stop - first * size]
