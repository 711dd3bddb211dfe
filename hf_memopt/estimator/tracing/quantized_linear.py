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
    """The memory that a quantization method's linear layer uses.

    Attributes:
        source: where it was read.
        tensors: of a layer of (inputs, outputs): name -> (shape, dtype).
        converts: whether it takes the place of a linear layer: (model, name of the layer, quantization).
        keeps_weight: the dequantized weight waits for backward, not only the codes.
        fused_rows: up to so many rows, forward multiplies with the codes; beyond, with the dequantized weight.
        split: partial outputs of a fused forward (split-k).
    """

    source: str
    tensors: Callable[[int, int, Any], dict]
    converts: Callable[[Any, str, Any], bool]
    keeps_weight: bool = False
    fused_rows: float = 0
    split: int = 0


class QuantizedModule(torch.nn.Module):
    """A layer of a package whose modules are no nn.Linear."""

    def __init__(self, inputs: int, outputs: int, scheme: Scheme, quantization):
        super().__init__()
        self.in_features, self.out_features, self.scheme = inputs, outputs, scheme
        self.infeatures, self.outfeatures = inputs, outputs  # where peft looks for them
        self.bias = None
        for name, (shape, dtype) in scheme.tensors(inputs, outputs, quantization).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the dtype of the matmul."""
        return torch.empty((self.out_features, self.in_features), dtype=_HALF).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch's own matmul saves the weight for the input's gradient.
        keeps = self.scheme.keeps_weight
        out = torch.matmul(x, self.dequantize(x.dtype).t()) if keeps else _Matmul.apply(x, self)
        return out if self.bias is None else out + self.bias


class _Matmul(torch.autograd.Function):
    """A matmul with codes that is differentiated for its input alone."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
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


def named_stand_ins(model: torch.nn.Module) -> set[str]:
    """The names of a model's layers that are no nn.Linear."""
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedModule)}


def _not_skipped(model, name: str, quantization) -> bool:
    """transformers' AWQ quantizer skips what the configuration names, and its own defaults."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    fp32 = getattr(model, "_keep_in_fp32_modules", None)
    skipped = getattr(quantization, "modules_to_not_convert", None)
    skipped = HfQuantizer.get_modules_to_not_convert(model, skipped, fp32, add_default_skips=True)
    return should_convert_module(name, skipped)


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


def _awq(inputs: int, outputs: int, quantization) -> dict:
    groups = 1 if quantization.group_size == -1 else -(-inputs // quantization.group_size)
    words = -(-outputs * quantization.bits // 32)
    return {
        "qweight": ((inputs, words), torch.int32),
        "qzeros": ((groups, words), torch.int32),
        "scales": ((groups, outputs), _HALF),
    }


def _gptq(inputs: int, outputs: int, quantization) -> dict:
    """As AWQ's, but weights are packed along the inputs, whose groups are listed."""
    return {
        **_awq(inputs, outputs, quantization),
        "qweight": ((-(-inputs * quantization.bits // 32), outputs), torch.int32),
        "g_idx": ((inputs,), torch.int32),
    }


SCHEMES = {
    "gptq": Scheme(
        source="gptqmodel 7.7: TorchLinear._forward_eager, the kernel that backend=auto_trainable chooses",
        tensors=_gptq,
        converts=_within_layers,
        keeps_weight=True,
    ),
    "awq": Scheme(
        source="gptqmodel 7.7: AwqGemmFn in nn_modules/qlinear/gemm_awq.py",
        tensors=_awq,
        converts=_not_skipped,
        fused_rows=1024,
        split=8,
    ),
}


# The packages whose modules the rows describe; on a card, real ones would run kernels that fake tensors cannot.
_PACKAGES = ("gptqmodel.",)


def stand_in(module: torch.nn.Module, quantization, method: str) -> torch.nn.Module | None:
    """Make the stand-in for a package's own layer in a loaded model; None for any other module."""
    if method not in SCHEMES or not type(module).__module__.startswith(_PACKAGES):
        return None
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if inputs is None:
        return None
    layer = QuantizedModule(inputs, outputs, SCHEMES[method], quantization)
    if getattr(module, "bias", None) is not None:
        layer.bias = torch.nn.Parameter(torch.empty(outputs, dtype=_HALF), requires_grad=False)
    return layer
