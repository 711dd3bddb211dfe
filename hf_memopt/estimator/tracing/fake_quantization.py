"""Quantized weights on fake tensors, as from_pretrained leaves them with a quantization_config."""

import copy
import re
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.tracing.quantized_linear import SCHEMES, QuantizedModule, Scheme

_USED = Part.BITSANDBYTES.relies_on(
    "transformers.quantizers.base:HfQuantizer._process_model_before_weight_loading(self, model)",
    why="replaces linear layers as from_pretrained does",
    until="from_config takes a quantization_config",
)


def is_quantized(config) -> bool:
    """True if a model's configuration says that its checkpoint is quantized."""
    return getattr(config, "quantization_config", None) is not None


def quantization_method(quantization) -> str:
    """The method's name in transformers' AUTO_QUANTIZER_MAPPING; "" for unquantized weights."""
    if quantization is None:
        return ""
    get = quantization.get if isinstance(quantization, dict) else lambda name: getattr(quantization, name, None)
    for bits in ("4bit", "8bit"):
        if get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    method = get("quant_method")
    return str(getattr(method, "value", method))


def quantize(model, quantization, pre_quantized: bool) -> None:
    """Replace a model's linear layers as from_pretrained does: transformers' own quantizers decide which, so that the
    head and skipped modules stay as they are.

    Args:
        quantization: one of transformers' quantization configurations, whose method it trains.
        pre_quantized: the checkpoint holds quantized weights.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    method = quantization_method(quantization)
    if method in SCHEMES or method == "compressed-tensors":
        # Their packages need not be installed: what the Trainer and peft ask of a quantizer.
        quantizer = SimpleNamespace(
            quantization_config=quantization, pre_quantized=pre_quantized, is_trainable=True, is_qat_trainable=False
        )
    else:
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=pre_quantized)
    if method.startswith("bitsandbytes"):
        _quantize_bitsandbytes(model, quantizer)
    elif method == "torchao":
        _quantize_torchao(model, quantizer)
    elif method in ("fp8", "mxfp8", "bitnet"):
        _quantize_by_transformers(model, quantizer, method)
    elif method == "compressed-tensors":
        _decompress(model, quantization)
    else:
        _quantize_by_stand_ins(model, quantization, SCHEMES[method])
    model.is_quantized = True
    model.quantization_method = quantization.quant_method
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantization
    for module in model.modules():  # so says from_pretrained; attention then casts to the configuration's dtype
        if hasattr(module, "config"):
            module.config._is_quantized = True


_CODES = 256  # of 8 bits


def _quantize_bitsandbytes(model, quantizer) -> None:
    from bitsandbytes import functional
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    quantization = quantizer.quantization_config
    quantization.bnb_4bit_compute_dtype = traceable_dtype(quantization.bnb_4bit_compute_dtype)
    before = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    # Outside the fake mode: the code table needs values, and transformers creates the new layers on meta tensors.
    with unset_fake_temporarily():
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
        quantizer._process_model_before_weight_loading(model, device_map={"": "cpu"})
    # A real table would keep every weight's quantization out of accounting.fake_outputs. The process needs it for real
    # models: the fake one stays in the quantized weights alone.
    with mock.patch.dict(functional.name2qmap, dynamic=torch.empty(_CODES, dtype=torch.float32)):
        _quantize_layers(model, before, quantization)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = quantization.load_in_8bit, quantization.load_in_4bit


def _quantize_layers(model, before: dict, quantization) -> None:
    """Fill bitsandbytes' layers with the quantized weights of the layers whose places they took."""
    import bitsandbytes

    for name, module in model.named_modules():
        if not isinstance(module, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
            continue
        old = before.pop(name)
        # transformers' Conv1D keeps its weight transposed.
        data = old.weight.data if type(old).__name__ != "Conv1D" else old.weight.data.T.contiguous()
        if quantization.load_in_8bit:
            module.weight = _weight_8bit(data, module.weight)
        else:
            module.weight = _weight_4bit(data, module.weight)
            module.quant_state = module.weight.quant_state  # bitsandbytes restores the weight's from here if sharded
        if old.bias is not None:
            module.bias = old.bias.requires_grad_(False)


def _weight_4bit(data, template):
    """A fake 4-bit weight with its quantization state: a plain Parameter, since Params4bit cannot hold a fake tensor.

    Args:
        data: the unquantized weight.
        template: the Params4bit that transformers put in its place.
    """
    from bitsandbytes import functional

    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    settings = {name: getattr(template, name) for name in names}
    codes, state = functional.quantize_4bit(data.contiguous(), **settings)
    weight = torch.nn.Parameter(codes, requires_grad=False)
    vars(weight).update(settings, quant_state=state, bnb_quantized=True)
    return weight


def _weight_8bit(data, template):
    """A fake 8-bit weight (Int8Params) with one fp32 scale a row; unquantized where `llm_int8_has_fp16_weight`."""
    if template.has_fp16_weights:
        weight = torch.nn.Parameter(data)
        vars(weight).update(CB=None, SCB=None, has_fp16_weights=True)
        return weight
    weight = torch.nn.Parameter(torch.empty(data.shape, dtype=torch.int8), requires_grad=False)
    vars(weight).update(CB=weight.data, SCB=torch.empty(data.shape[0], dtype=torch.float32), has_fp16_weights=False)
    return weight


def _quantize_torchao(model, quantizer) -> None:
    """torchao's own conversion, which runs on fake tensors; its kernels do, too."""
    from torchao.quantization import quantize_

    quantizer._process_model_before_weight_loading(model)
    kind = copy.copy(quantizer.quantization_config.quant_type)
    kind.set_inductor_config = False  # it would change settings of torch.compile for the whole process
    quantize_(model, kind, lambda module, name: quantizer.param_needs_quantization(model, f"{name}.weight"))


def _quantize_by_transformers(model, quantizer, method: str) -> None:
    """Methods whose modules are transformers' own: they are created on meta tensors, which become fake ones."""
    quantizer._process_model_before_weight_loading(model)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                empty = torch.empty(weight.shape, dtype=traceable_dtype(weight.dtype))
                trained = weight.requires_grad and method == "bitnet"
                setattr(module, name, torch.nn.Parameter(empty, requires_grad=trained))


def _decompress(model, quantization) -> None:
    """compressed-tensors (0.20) decompresses the whole model at its first forward, for good, and keeps the scales
    (ModelCompressor.add_decompress_hook)."""
    groups = getattr(quantization, "config_groups", None) or {}
    settings = next((group["weights"] for group in groups.values() if group.get("weights")), {})
    ignored = getattr(quantization, "ignore", None) or ()  # a field that the checkpoint may leave out
    for name, module in model.named_modules():
        skipped = any(re.fullmatch(part.removeprefix("re:"), name) for part in ignored)
        if type(module) is torch.nn.Linear and not skipped:
            module.requires_grad_(False)
            size = settings.get("group_size") or module.in_features
            shape = (module.out_features, -(-module.in_features // size))
            module.register_buffer("weight_scale", torch.empty(shape, dtype=module.weight.dtype))
            if not settings.get("symmetric", True):
                module.register_buffer("weight_zero_point", torch.empty(shape, dtype=torch.int8))


def _quantize_by_stand_ins(model, quantization, scheme: Scheme) -> None:
    """Methods whose package need not be installed (quantized_linear.SCHEMES)."""
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and scheme.converts(model, name, quantization):
            layer = QuantizedModule(module.in_features, module.out_features, scheme, quantization)
            if module.bias is not None:
                layer.bias = module.bias.requires_grad_(False)
            model.set_submodule(name, layer)


def loaded_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that a model keeps: parameters, buffers, and scales beside quantized weights."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from _companions(module)


def _companions(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of a quantized layer beside its parameters and buffers: bitsandbytes' scales and code tables."""
    weight = getattr(module, "weight", None)
    state = getattr(weight, "quant_state", None) or expert_state(module)
    if state is not None:
        nested = state.state2
        parts = (state.absmax, state.code, state.offset, *((nested.absmax, nested.code) if nested else ()))
        yield from (part for part in parts if isinstance(part, torch.Tensor))
    for owner in (weight, getattr(module, "state", None)):  # the state takes the weight's at the first forward
        scales = getattr(owner, "SCB", None)
        if isinstance(scales, torch.Tensor):
            yield scales


def expert_state(module: torch.nn.Module):
    """The QuantState of experts, in the parametrization that dequantizes them (levers.quantized_experts); or None."""
    return getattr(module, "quant_state", None) if type(module).__name__ == "Bnb4bitParametrization" else None


# Bytes for each element of a weight that is quantized while it is loaded, beside what stays of it.
_STAGED_BYTES = {
    "bitsandbytes_4bit": 2,  # the weight itself
    "bitsandbytes_8bit": 4,  # and its copy in fp16 (bitsandbytes.nn.Int8Params._quantize)
}


# Bytes for each element of experts that are dequantized while they are loaded, beside the result: packed values and
# scales, and the indices of half of them as int32 and, in torch's indexing, int64, with what they select (transformers
# 5.23, integrations.mxfp4._convert_moe_packed_tensors; tests/estimator/test_quantized_jobs.py measures it on a CPU).
_DEQUANTIZED_BYTES = {"mxfp4": 7.65625}


def staged_bytes(model: torch.nn.Module, dequantized: str = "") -> int:
    """The most that loading needs beside the weights that it has converted; 0 where it converts none.

    Args:
        dequantized: the method of a checkpoint whose weights are dequantized.
    """
    if dequantized:
        experts = (weight.numel() for weight in model.parameters() if weight.dim() == 3)
        return int(max(experts, default=0) * _DEQUANTIZED_BYTES.get(dequantized, 0))
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.pre_quantized:
        return 0
    converted = (module for module in model.modules() if _is_converted(module))
    largest = max((module.in_features * module.out_features for module in converted), default=0)
    layer = largest * _STAGED_BYTES.get(quantization_method(quantizer.quantization_config), 0)
    # Checkpoints have a tensor for each expert: gates and ups are stacked, then joined (transformers 5.23,
    # core_model_loading.Concatenate), and stacks and result are there together.
    states = (state for module in model.modules() if (state := expert_state(module)) is not None)
    experts = max((2 * state.shape.numel() * state.dtype.itemsize for state in states), default=0)
    return max(layer, experts)


def _is_converted(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if not hasattr(module, "in_features") or not isinstance(weight, torch.Tensor):
        return False
    # 4-bit codes may be stored as floating-point numbers (bnb_4bit_quant_storage), so that FSDP shards them.
    return hasattr(weight, "quant_state") or not weight.is_floating_point() or is_traceable_wrapper_subclass(weight)


def traceable_dtype(dtype):
    """bfloat16 for float16, which the CPU's autocast does not support; both take two bytes."""
    return torch.bfloat16 if dtype is torch.float16 else dtype
