"""Operators on fake tensors: replacements for kernels that allocate otherwise than the real ones."""

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_memopt.estimator.accounting.int8_kernels import find_int8_kernels
from hf_memopt.estimator.accounting.known_values import known_value
from hf_memopt.estimator.private_names import Part
from hf_memopt.packages import is_installed
from hf_memopt.stack.versions import has

_aten = torch.ops.aten


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


def _dropout(values, probability, train):
    """CUDA's fused dropout (ATen/native/cuda/Dropout.cu): the output and a mask of a byte an element."""
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


def _rms_norm(input, shape, weight, eps):
    """CUDA's fused RMS norm (ATen/native/cuda/layer_norm_kernel.cu): the output, and a scale of each row in fp32."""
    rows = (*input.shape[: input.dim() - len(shape)], *[1] * len(shape))
    return torch.empty_like(input), torch.empty(rows, dtype=torch.float32, device=input.device)


def _rms_norm_backward(gradient, input, shape, scales, weight, needed):
    of_input, of_weight = needed
    return torch.empty_like(input) if of_input else None, torch.empty_like(weight) if of_weight else None


def _grouped_mm(left, right, offs=None, bias=None, out_dtype=None):
    """The experts' matmuls, one group of rows each. torch 2.13's fake kernel takes bf16 only, the CPU's any dtype."""
    if left.dim() == 2 and right.dim() == 2:  # a gradient of the experts' weights
        size = (offs.shape[0], left.shape[0], right.shape[1])
    else:
        size = (*(left.shape[:-1] if right.dim() == 3 else left.shape[1:-1]), right.shape[-1])
    return torch.empty(size, dtype=out_dtype or left.dtype, device=left.device)


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """CTC's losses and alphas, whose size follows from the longest target (ctc_loss_allocate_outputs in
    ATen/native/LossCTC.cpp); torch 2.13 has no fake kernel for lengths in tensors."""
    frames, samples = log_probs.shape[0], log_probs.shape[1]
    lengths = known_value(target_lengths)
    with unset_fake_temporarily():
        longest = targets.shape[-1] if lengths is None else int(lengths.max())
    losses = torch.empty(samples, dtype=log_probs.dtype, device=log_probs.device)
    alphas = torch.empty((samples, frames, 2 * longest + 1), dtype=log_probs.dtype, device=log_probs.device)
    return losses, alphas


def _ctc_loss_backward(gradient, log_probs, targets, input_lengths, target_lengths, losses, alphas, *args):
    betas = torch.empty_like(alphas)
    result = torch.empty_like(log_probs)
    del betas
    return result


# Kernels that allocate otherwise than the fake ones for the CPU. Waiting for a collective returns the tensor itself.
ON_CPU = {
    _aten._grouped_mm.default: _grouped_mm,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    torch.ops._c10d_functional.wait_tensor.default: lambda awaited: awaited,
}
ON_ACCELERATOR = {
    **ON_CPU,
    _FORWARD: _attention,
    _BACKWARD: _attention_backward_on_cuda,
    _aten.native_dropout.default: _dropout,
    _aten.native_dropout_backward.default: lambda gradient, mask, scale: torch.empty_like(gradient),
    _aten._fused_rms_norm.default: _rms_norm,
    _aten._fused_rms_norm_backward.default: _rms_norm_backward,
}


_HALF = (torch.bfloat16, torch.float16)
_MEANS = {_aten.mean.default, _aten.mean.dim}
_REDUCTIONS = {_aten.sum.default, _aten.sum.dim_IntList, _aten.linalg_vector_norm.default, *_MEANS}


def reduced_in(func, args: tuple, kwargs: dict, accelerator: bool) -> torch.dtype | None:
    """The type to which a reduction first casts a copy of what it reduces; None where it reads that as it is.

    CUDA's kernels read 16 bits and add in 32 (gpu_lowp_to_f32 in ATen/native/ReduceOpsUtils.h), others and the CPU's
    read the type of the result. Means of 16 bits are sums in 32 on a CPU (ReduceOps.cpp).
    """
    if func not in _REDUCTIONS or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return None
    half, dtype = args[0].dtype in _HALF, kwargs.get("dtype") or args[0].dtype
    if accelerator and half and dtype == torch.float32:
        return None
    if not accelerator and func in _MEANS and dtype in _HALF:
        dtype = torch.float32
    return dtype if dtype != args[0].dtype else None


def _svd(matrix, full_matrices=False, compute_uv=True, *, driver=None):
    """LAPACK and cuSOLVER decompose a copy of the matrix (torch's BatchLinearAlgebra.cpp, BatchLinearAlgebraLib.cpp);
    their workspaces are not counted. GaLore's projections need it: thin, of one matrix."""
    rows, columns = matrix.shape
    copy = matrix.new_empty(matrix.shape)
    rank = min(rows, columns)
    parts = matrix.new_empty((rank, rows)).mT, matrix.new_empty(rank), matrix.new_empty((columns, rank)).mT
    del copy
    return parts


_USED = Part.BITSANDBYTES.relies_on(
    "bitsandbytes.backends.default.ops:_gemm_4bit_default_impl(A, B)",
    "bitsandbytes.backends.cpu.ops:_optimizer_update_8bit_blockwise_cpu(optimizer_name, g, p, state1)",
    "bitsandbytes.backends.cpu.ops:_optimizer_update_32bit_cpu(optimizer_name, g, p, state1)",
    why="their temporaries, which the fake kernels do not show",
    until="the fake kernels allocate them",
    since="0.50",
)


def find_python_kernels(accelerator: bool) -> dict:
    """Operators whose temporaries their fake kernels do not allocate: singular values, and those of bitsandbytes that
    are written in Python.

    Its 4-bit matmul dequantizes the weight first, always on the CPU and beyond a few hundred tokens on CUDA
    (_dequant_linear_fallback in bitsandbytes/backends/cuda/ops.py). Its optimizers are Python on the CPU only.
    """
    python_kernels = {_aten._linalg_svd.default: _svd}
    if not is_installed("bitsandbytes") or not has("bitsandbytes", "0.50"):
        return python_kernels  # older ones are Python around their kernels, and have no optimizers on the CPU
    from bitsandbytes.backends.cpu import ops
    from bitsandbytes.backends.default import ops as everywhere

    python_kernels[torch.ops.bitsandbytes.gemm_4bit.default] = everywhere._gemm_4bit_default_impl
    python_kernels |= find_int8_kernels(accelerator)
    if accelerator:
        return python_kernels
    return python_kernels | {
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default: ops._optimizer_update_8bit_blockwise_cpu,
        torch.ops.bitsandbytes.optimizer_update_32bit.default: ops._optimizer_update_32bit_cpu,
    }
