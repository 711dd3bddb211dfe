"""FP8 matmuls of transformers on fake tensors: their kernels come from the hub and run on cards alone."""

from contextlib import AbstractContextManager
from types import SimpleNamespace

import torch

from hf_memopt.estimator.private_names import Part

_KERNELS = Part.FP8.replaces(
    "transformers.integrations.finegrained_fp8:load_finegrained_fp8_kernel()",
    why="the kernels come from the hub and run on cards alone",
)


def counted_fp8_kernels() -> AbstractContextManager:
    """A context in which the finegrained-fp8 kernels allocate their outputs.

    They quantize activations as they go (finegrained_fp8_linear in transformers 5.23). DeepGEMM, which transformers
    prefers on Hopper, also holds a copy of the input, one byte an element.
    """
    kernels = SimpleNamespace(matmul=_matmul, grouped_matmul=_matmul, batched_matmul=_matmul)
    return _KERNELS.replaced(load_finegrained_fp8_kernel=lambda: kernels)


def _matmul(left, right, scales, *args, **kwargs):
    return torch.empty((*left.shape[:-1], right.shape[-2]), dtype=left.dtype)
