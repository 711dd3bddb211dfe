"""Operators on fake tensors: replacements for kernels that allocate otherwise than the real ones, and a fast path."""

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_aten = torch.ops.aten

# Most operators of a step. Their outputs follow from shapes and dtypes, by torch's kernels for the meta device, which
# for these are written in C++.
_PLAIN = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.detach.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.permute.default,
    _aten.mm.default,
    _aten._to_copy.default,
    _aten.clone.default,
}
_PLAIN_KEYWORDS = {"dtype", "memory_format"}


def is_plain(func, args, kwargs) -> bool:
    """Whether run_on_meta() can run an operator: one of _PLAIN, or a `cat` of many tensors, as engines concatenate the
    shards of all ranks."""
    if func in _PLAIN:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return not (kwargs and kwargs.keys() - _PLAIN_KEYWORDS) and all(map(_has_no_value, tensors))
    return func is _aten.cat.default and len(args[0]) > 16 and all(map(_has_no_value, args[0]))


def _has_no_value(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cpu" and tensor.constant is None


def run_on_meta(func, args, kwargs) -> FakeTensor:
    """What FakeTensorMode returns for an operator, without its cache lookup, which takes several times as long as the
    operator."""
    first = args[0] if isinstance(args[0], FakeTensor) else args[0][0]
    with in_kernel_invocation_manager(first.fake_mode):
        out = func(*args, **kwargs)
    return FakeTensor(first.fake_mode, out, first.fake_device)


def _attention(query, key, value, *args, **kwargs):
    """CUDA's flash attention returns its output in the layout (batch, tokens, heads, size), which the model need not
    copy; the CPU's kernel keeps the query's layout.

    Returns:
        Output (batch, heads, tokens, size) and log-sum-exp (batch, heads, tokens), in fp32 for half precision.
    """
    batch, heads, tokens, _ = query.shape
    size = (batch, heads, tokens, value.shape[-1])
    out = torch.empty_permuted(size, (0, 2, 1, 3), dtype=query.dtype, device=query.device)
    wide = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    logsumexp = torch.empty((batch, tokens, heads), dtype=wide, device=query.device).transpose(1, 2)
    return out, logsumexp


_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _attention_backward_on_cuda(gradient, query, *args, **kwargs):
    """FlashAttention's backward accumulates the query's gradient in fp32 (dq_accum in flash_api.cpp)."""
    accumulator = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    result = _BACKWARD(gradient, query, *args, **kwargs)
    del accumulator
    return result


def _grouped_mm(left, right, offs=None, bias=None, out_dtype=None):
    """The experts' matmuls, one group of rows each. torch 2.13's fake kernel takes bf16 only, the CPU's any dtype."""
    if left.dim() == 2 and right.dim() == 2:  # a gradient of the experts' weights
        size = (offs.shape[0], left.shape[0], right.shape[1])
    else:
        size = (*(left.shape[:-1] if right.dim() == 3 else left.shape[1:-1]), right.shape[-1])
    return torch.empty(size, dtype=out_dtype or left.dtype, device=left.device)


# Kernels that allocate otherwise than the fake ones for the CPU. Waiting for a collective returns the tensor itself.
ON_CPU = {
    _aten._grouped_mm.default: _grouped_mm,
    torch.ops._c10d_functional.wait_tensor.default: lambda awaited: awaited,
}
ON_ACCELERATOR = {**ON_CPU, _FORWARD: _attention, _BACKWARD: _attention_backward_on_cuda}


def find_python_kernels(accelerator: bool) -> dict:
    """bitsandbytes' operators that are written in Python, whose temporaries its fake kernels do not allocate.

    Its 4-bit matmul dequantizes the weight first, always on the CPU and beyond a few hundred tokens on CUDA
    (_dequant_linear_fallback in bitsandbytes/backends/cuda/ops.py). Its optimizers are Python on the CPU only.
    """
    try:
        from bitsandbytes.backends.cpu import ops
        from bitsandbytes.backends.default import ops as everywhere
    except ImportError:
        return {}
    python_kernels = {torch.ops.bitsandbytes.gemm_4bit.default: everywhere._gemm_4bit_default_impl}
    if accelerator:
        return python_kernels
    return python_kernels | {
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default: ops._optimizer_update_8bit_blockwise_cpu,
        torch.ops.bitsandbytes.optimizer_update_32bit.default: ops._optimizer_update_32bit_cpu,
    }
