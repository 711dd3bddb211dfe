"""Linear layers of quantization packages that need not be installed: what they keep, save and allocate.

Each row of SCHEMES names the source of what it says. Kernels for CUDA are assumed; they cannot run on fake tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_HALF = torch.bfloat16  # for fp16, too (dtypes.traceable_dtype)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a quantization method's linear layer uses memory.

    Attributes:
        source: where it was read.
        measured: what it was compared with.
        tensors: of a layer of (inputs, outputs): name -> (shape, dtype).
        converts: whether it takes the place of a linear layer: (model, name of the layer, quantization).
        buffers: its tensors are buffers and no parameters.
        keeps: what waits for backward: nothing but the codes, the "input", or the dequantized "weight".
        fused_rows: up to so many rows, forward multiplies with the codes; beyond, with the dequantized weight.
        split: partial outputs of a fused forward (split-k).
        beside: of a layer of (inputs, outputs): bytes that dequantizing takes beside its result.
        module: what stands for the layer.
    """

    source: str
    measured: str = "not measured"
    tensors: Callable[[int, int, Any], dict]
    converts: Callable[[Any, str, Any], bool]
    buffers: bool = False
    keeps: str = ""
    fused_rows: float = 0
    split: int = 0
    beside: Callable[[int, int], int] = lambda inputs, outputs: 0
    module: type


class _Layer:
    """What QuantizedModule and QuantizedLinear share."""

    def _set_up(self, inputs: int, outputs: int, scheme: Scheme, quantization) -> None:
        self.in_features, self.out_features, self.scheme = inputs, outputs, scheme
        self.infeatures, self.outfeatures = inputs, outputs  # where peft looks for them
        self.bias = None
        for name, (shape, dtype) in scheme.tensors(inputs, outputs, quantization).items():
            tensor = torch.empty(shape, dtype=dtype)
            if scheme.buffers:
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the dtype of the matmul."""
        beside = torch.empty(self.scheme.beside(self.in_features, self.out_features), dtype=torch.uint8)
        weight = torch.empty((self.out_features, self.in_features), dtype=_HALF)
        del beside
        return weight.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scheme.keeps == "weight":  # torch's own matmul saves the weight for the input's gradient
            out = torch.matmul(x, self.dequantize(x.dtype).t())
        else:
            out = _Matmul.apply(x, self)
        return out if self.bias is None else out + self.bias


class QuantizedModule(_Layer, torch.nn.Module):
    """A layer of a package whose modules are no nn.Linear."""

    def __init__(self, inputs: int, outputs: int, scheme: Scheme, quantization):
        super().__init__()
        self._set_up(inputs, outputs, scheme, quantization)


class QuantizedLinear(_Layer, torch.nn.Linear):
    """A layer of a package whose modules are nn.Linear, which peft adapts as such."""

    def __init__(self, inputs: int, outputs: int, scheme: Scheme, quantization):
        torch.nn.Module.__init__(self)
        self._set_up(inputs, outputs, scheme, quantization)


class _Matmul(torch.autograd.Function):
    """A matmul with codes that is differentiated for its input alone."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        if layer.scheme.keeps == "input":
            ctx.save_for_backward(x)
        shape = (*x.shape[:-1], layer.out_features)
        if x.numel() // x.shape[-1] > layer.scheme.fused_rows:
            return torch.matmul(x, layer.dequantize(x.dtype).t())
        parts = torch.empty((layer.scheme.split, *shape), dtype=x.dtype)
        out = torch.empty(shape, dtype=x.dtype)
        del parts
        return out

    @staticmethod
    def backward(ctx, gradient):
        return torch.matmul(gradient, ctx.layer.dequantize(gradient.dtype)), None


class StandInQuantizer:
    """What the Trainer and peft ask a model's `hf_quantizer`."""

    is_trainable = True
    is_qat_trainable = False

    def __init__(self, quantization_config, pre_quantized: bool):
        self.quantization_config = quantization_config
        self.pre_quantized = pre_quantized


def lora_modules() -> dict[type, type]:
    """What peft puts around a stand-in. Its LoRA layers for GPTQ, AWQ, AQLM and EETQ do the same to memory, and this
    one is there without its package."""
    from peft.tuners.lora.awq import AwqLoraLinear

    return {QuantizedModule: AwqLoraLinear}


def named_stand_ins(model: torch.nn.Module) -> set[str]:
    """The names of a model's layers that are no nn.Linear."""
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedModule)}


def _skips(*names: str, defaults: bool = False) -> Callable[[Any, str, Any], bool]:
    """`converts` of methods that skip the layers in a field of their configuration."""

    def converts(model, name: str, quantization) -> bool:
        from transformers.quantizers.base import HfQuantizer
        from transformers.quantizers.quantizers_utils import should_convert_module

        (skipped,) = (getattr(quantization, field, None) for field in names)
        fp32 = getattr(model, "_keep_in_fp32_modules", None)
        skipped = HfQuantizer.get_modules_to_not_convert(model, skipped, fp32, add_default_skips=defaults)
        return should_convert_module(name, skipped)

    return converts


def _within_layers(model, name: str, quantization) -> bool:
    """optimum converts the linear layers of the repeated layers, or those that a checkpoint lists (optimum.gptq,
    GPTQQuantizer.convert_model)."""
    listed = [part for group in quantization.modules_in_block_to_quantize or () for part in group]
    if listed and not any(name.endswith(part) for part in listed):
        return False
    parents = name.split(".")
    return any(
        isinstance(model.get_submodule(".".join(parents[:end])), torch.nn.ModuleList) for end in range(1, len(parents))
    )


def _groups(inputs: int, quantization) -> int:
    return 1 if quantization.group_size == -1 else -(-inputs // quantization.group_size)


def _gptq(inputs: int, outputs: int, quantization) -> dict:
    groups, words = _groups(inputs, quantization), -(-outputs * quantization.bits // 32)
    return {
        "qweight": ((-(-inputs * quantization.bits // 32), outputs), torch.int32),
        "qzeros": ((groups, words), torch.int32),
        "scales": ((groups, outputs), _HALF),
        "g_idx": ((inputs,), torch.int32),
    }


def _awq(inputs: int, outputs: int, quantization) -> dict:
    groups, words = _groups(inputs, quantization), -(-outputs * quantization.bits // 32)
    return {
        "qweight": ((inputs, words), torch.int32),
        "qzeros": ((groups, words), torch.int32),
        "scales": ((groups, outputs), _HALF),
    }


def _eetq(inputs: int, outputs: int, quantization) -> dict:
    return {"weight": ((inputs, outputs), torch.int8), "weight_scales": ((outputs,), _HALF)}


def _aqlm(inputs: int, outputs: int, quantization) -> dict:
    rows, columns = outputs // quantization.out_group_size, inputs // quantization.in_group_size
    books, bits = quantization.num_codebooks, quantization.nbits_per_codebook
    code = next(dtype for dtype in (torch.int8, torch.int16, torch.int32) if dtype.itemsize * 8 >= bits)
    book = (books, 2**bits, quantization.out_group_size, quantization.in_group_size)
    return {
        "codebooks": (book, _HALF),
        "codes": ((rows, columns, books), code),
        "scales": ((rows, 1, 1, 1), _HALF),
    }


def _quanto(inputs: int, outputs: int, quantization) -> dict:
    bits = {"int8": 8, "float8": 8, "int4": 4, "int2": 2}[quantization.weights]
    if bits == 8:
        return {"weight": ((outputs, inputs), torch.int8), "scale": ((outputs, 1), _HALF), **_QUANTO_SCALARS}
    size = next((size for size in (128, 96, 64, 32) if inputs > 128 and inputs % size == 0), inputs)
    parameters = ((outputs * inputs // size, 1), _HALF)
    codes = ((outputs * inputs * bits // 8,), torch.uint8)
    return {"weight": codes, "scale": parameters, "shift": parameters, **_QUANTO_SCALARS}


_QUANTO_SCALARS = {name: ((), _HALF) for name in ("input_scale", "output_scale")}

SCHEMES = {
    "gptq": Scheme(
        source="gptqmodel 7.7: TorchLinear._forward_eager, the kernel that backend=auto_trainable chooses",
        tensors=_gptq,
        buffers=True,
        converts=_within_layers,
        keeps="weight",
        module=QuantizedModule,
    ),
    "awq": Scheme(
        source="gptqmodel 7.7: AwqGemmFn in nn_modules/qlinear/gemm_awq.py",
        tensors=_awq,
        buffers=True,
        converts=_skips("modules_to_not_convert", defaults=True),
        fused_rows=1024,
        split=8,
        module=QuantizedModule,
    ),
    "eetq": Scheme(
        source="transformers.integrations.eetq: EetqLinearMMFunction, with an identity matrix to dequantize",
        tensors=_eetq,
        converts=_skips("modules_to_not_convert"),
        keeps="input",
        fused_rows=float("inf"),
        # torch.eye is fp32, its copy fp16; both are there before the weight is
        beside=lambda inputs, outputs: max(2 * inputs**2, 6 * inputs**2 - 2 * inputs * outputs),
        module=QuantizedModule,
    ),
    "aqlm": Scheme(
        source="aqlm 1.1.7: _QuantizedMatmul in inference.py, code1x16_matmat_dequant",
        tensors=_aqlm,
        converts=_skips("linear_weights_not_to_quantize"),
        keeps="input",
        module=QuantizedModule,
    ),
    "quanto": Scheme(
        source="optimum-quanto 0.2.7: WeightQBytesLinearFunction, qbytes_mm",
        measured="as much as training int8, float8 and int4 weights took on a CPU",
        tensors=_quanto,
        converts=_skips("modules_to_not_convert"),
        keeps="input",
        module=QuantizedLinear,
    ),
}


# The packages whose modules the rows describe; on a card, real ones would run kernels that fake tensors cannot.
_PACKAGES = ("gptqmodel.", "aqlm.", "optimum.quanto.", "transformers.integrations.eetq")


def stand_in(module: torch.nn.Module, quantization, method: str) -> torch.nn.Module | None:
    """What stands for a package's own layer in a loaded model; None for any other module."""
    if method not in SCHEMES or not type(module).__module__.startswith(_PACKAGES):
        return None
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if inputs is None and hasattr(module, "weight_scales"):  # EetqLinear
        inputs, outputs = module.weight.shape
    if inputs is None:
        return None
    scheme = SCHEMES[method]
    layer = scheme.module(inputs, outputs, scheme, quantization)
    if getattr(module, "bias", None) is not None:
        layer.bias = torch.nn.Parameter(torch.empty(outputs, dtype=_HALF), requires_grad=False)
    return layer
