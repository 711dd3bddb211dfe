"""Autocast as it is on CUDA, for jobs that are traced on the CPU, where its list of fp32 operators is another one.

On CUDA layer norms, softmax and powers are computed in fp32 and give fp32 results; on the CPU they stay in bf16, so
that GPT-2's activation function alone would seem to need half of what it does. The lists are AT_FORALL_FP32 and
AT_FORALL_FP32_SET_OPT_DTYPE of ATen/autocast_mode.h.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_memopt.estimator.patches.replacement import all_replaced, original
from hf_memopt.estimator.patches.table import FP32_UNDER_CUDA_AUTOCAST, path_to


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Compute in fp32 what CUDA's autocast does, wherever autocast is on.

    (A TorchFunctionMode would not do: it is not in force where backward recomputes a checkpointed layer.)
    """
    paths = [path_to(owner, name) for owner, names in FP32_UNDER_CUDA_AUTOCAST.items() for name in names]
    with all_replaced({path: _in_fp32(original(path)) for path in paths}):
        yield


def _in_fp32(function):
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
