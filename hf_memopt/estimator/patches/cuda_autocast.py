"""CUDA's autocast for jobs that are traced on the CPU, whose autocast has another list of fp32 operators.

CUDA computes layer norms, softmax and powers in fp32 and returns fp32; the CPU keeps them in bf16, so that GPT-2's
activation function alone would be counted at half its size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_memopt.estimator.patches.replacement import all_replaced, original, replaced
from hf_memopt.estimator.patches.table import FP32_UNDER_CUDA_AUTOCAST, path_to


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Compute CUDA autocast's fp32 operators in fp32 wherever autocast is enabled.

    Not a TorchFunctionMode: that is not active while backward recomputes a checkpointed layer.
    """
    paths = [path_to(owner, name) for owner, names in FP32_UNDER_CUDA_AUTOCAST.items() for name in names]
    with all_replaced({path: in_fp32(original(path)) for path in paths}):
        yield


@contextmanager
def named_cuda_autocast() -> Iterator[None]:
    """Answer code that asks for CUDA's autocast, which the CPU's stands for, as on CUDA.

    Without an argument torch.is_autocast_enabled() asks so, whatever device the tensors are on: peft converts the
    inputs of quantized layers where it says no.
    """
    enabled = original("torch:is_autocast_enabled")

    def answered(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    with replaced("torch:is_autocast_enabled", answered):
        yield


def in_fp32(function):
    """A function that autocast computes in fp32."""

    def compute(*args, **kwargs):
        if not torch.is_autocast_enabled("cpu") or kwargs.get("dtype"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})

    return compute


def _wide(value):
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
