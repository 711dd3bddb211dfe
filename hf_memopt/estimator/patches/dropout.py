"""Dropout as CUDA, ROCm and Intel's GPUs run it, for jobs that are traced on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_memopt.estimator.patches.replacement import original, replaced


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Run dropout as one kernel where those devices do (is_fused_kernel_acceptable in ATen/native/Dropout.cpp).

    It keeps a mask of a byte an element for backward; elsewhere noise in the input's type is drawn, scaled, multiplied
    and kept.
    """
    unfused = original("torch.nn.functional:dropout")

    def drop(input, p=0.5, training=True, inplace=False):
        if training and not inplace and 0 < p < 1 and input.numel():
            return torch.native_dropout(input, p, True)[0]
        return unfused(input, p, training, inplace)

    with replaced("torch.nn.functional:dropout", drop):
        yield
