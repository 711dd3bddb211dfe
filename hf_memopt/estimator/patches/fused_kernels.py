"""What CUDA, ROCm and Intel's GPUs run as one kernel and a CPU as several, for jobs that are traced on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_memopt.estimator.patches.cuda_autocast import in_fp32
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


@contextmanager
def device_rms_norm(fused: bool) -> Iterator[None]:
    """Run torch's RMS norm in fp32 under autocast, which Metal's does not do (AT_FORALL_FP32 in ATen/autocast_mode.h).

    Args:
        fused: as one kernel where CUDA does (rms_norm_symint in ATen/native/layer_norm.cpp). It keeps its input and a
            number a row; the CPU's operators keep the input in fp32 and two products of its size.
    """
    unfused = original("torch:rms_norm")

    def norm(input, normalized_shape, weight=None, eps=None):
        if not fused or input.is_complex() or (weight is not None and weight.dtype is not input.dtype):
            return unfused(input, normalized_shape, weight, eps)
        return _RMSNorm.apply(input, normalized_shape, weight, eps)

    with replaced("torch:rms_norm", in_fp32(norm)):
        yield


class _RMSNorm(torch.autograd.Function):
    """torch's own formula for that kernel, which it has for devices with the kernel only."""

    @staticmethod
    def forward(ctx, input, shape, weight, eps):
        with torch._C._AutoDispatchBelowAutograd():  # above, the CPU's operators would take its place
            out, scales = torch.ops.aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, scales)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx, gradient):
        input, weight, scales = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_input, of_weight = torch.ops.aten._fused_rms_norm_backward(
            gradient, input, ctx.shape, scales, weight, needed
        )
        return of_input, None, of_weight, None
