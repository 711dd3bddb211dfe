"""bitsandbytes' 8-bit matmul (LLM.int8()), operator by operator, as its kernels of CUDA and of the CPU allocate.

Its fake kernels return unbacked sizes for the columns with outliers, which only real activations know; none is counted
here. (LLM.int8() reports 0.1 % of the columns.)
"""

import torch


def find_int8_kernels(accelerator: bool) -> dict:
    """Stand-ins for bitsandbytes' operators: those of bitsandbytes/backends/cuda/ops.py on an accelerator, those of
    backends/default/ops.py on a CPU."""
    ops = torch.ops.bitsandbytes
    return {
        ops.int8_vectorwise_quant.default: _quantize_on_cuda if accelerator else _quantize_on_cpu,
        ops.int8_scaled_mm.default: _matmul_on_cuda if accelerator else _matmul_on_cpu,
        ops.int8_mixed_scaled_mm.default: _mixed_matmul,
    }


def matmul_on_cuda(left, right, out=None, state=None, threshold=0.0, bias=None):
    """bitsandbytes.matmul, which on a CPU trains with another function (MatMul8bitFp) than on CUDA."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    if threshold > 0.0:
        state.threshold = threshold
    return MatMul8bitLt.apply(left, right, out, bias, state)


def _no_outliers(tensor, threshold: float):
    if threshold == 0:
        return None
    torch.ge(tensor.abs(), threshold)  # allocated, and free again
    return torch.empty(0, dtype=torch.int64)


def _quantize_on_cuda(tensor, threshold=0.0):
    scales = torch.empty(tensor.numel() // tensor.shape[-1], dtype=torch.float32)
    return torch.empty(tensor.shape, dtype=torch.int8), scales, _no_outliers(tensor, threshold)


def _quantize_on_cpu(tensor, threshold=0.0):
    outliers = _no_outliers(tensor, threshold)
    scales = torch.max(tensor.abs(), dim=1).values.float()
    return torch.round(tensor * (127.0 / scales.unsqueeze(-1))).to(torch.int8), scales, outliers


def _matmul_on_cuda(left, right, row_scales, column_scales, bias=None, dtype=None):
    accumulators = torch._int_mm(left.reshape(-1, left.shape[-1]), right.t()).reshape(*left.shape[:-1], right.shape[0])
    return torch.empty(accumulators.shape, dtype=torch.float16).to(dtype or torch.float16)


def _matmul_on_cpu(left, right, row_scales, column_scales, bias=None, dtype=None):
    accumulators = torch.empty((*left.shape[:-1], right.shape[0]), dtype=torch.int32)
    out = accumulators * (row_scales.reshape(-1, 1) * column_scales.reshape(1, -1)) * 6.2e-05
    if bias is not None:
        out += bias
    return out.to(dtype or torch.float16)


def _mixed_matmul(left, codes, right, row_scales, column_scales, outlier_columns=None, bias=None):
    matmul = torch.ops.bitsandbytes.int8_scaled_mm.default
    out = matmul(codes, right, row_scales, column_scales, bias=bias, dtype=left.dtype)
    return out, left.new_empty(0)
