"""Operators as accelerators run them, for jobs of accelerators, which are traced on the CPU.

Registered with torch.library for the CPU while a trace lasts. torch keeps the names of its operators compatible, so
none needs a declaration.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_memopt.estimator.private_names import Part

_aten = torch.ops.aten
# AT_FORALL_FP32 of ATen/autocast_mode.h (torch 2.13): what autocast computes in fp32 on CUDA, ROCm, XPU and MPS. The
# CPU's keeps most of it in bf16, so that GPT-2's activation function alone would be counted at half its size.
_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "dist", "renorm", "logsumexp"),
    *("cdist", "pdist", "layer_norm", "group_norm", "cosine_similarity", "softplus"),
    *("nll_loss", "nll_loss2d", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "multi_margin_loss", "poisson_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss"),
    *("kl_div", "margin_ranking_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits"),
)
# AT_FORALL_FP32_SET_OPT_DTYPE: fp32 unless the caller asks for a dtype.
_FP32_BY_DEFAULT = (
    *("prod", "prod.dim_int", "cumprod", "cumsum", "sum", "sum.dim_IntList", "softmax.int", "log_softmax.int"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
# Of CUDA and XPU, but not of MPS (AutocastMPS in ATen/autocast_mode.cpp).
_FP32_WITHOUT_METAL = (
    *("rms_norm", "norm.Scalar", "norm.ScalarOpt_dim"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa"),
    "_upsample_bicubic2d_aa",
)
_HALVES = (torch.bfloat16, torch.float16)


@contextmanager
def accelerator_operators(backend: str) -> Iterator[None]:
    """Have the CPU's autocast and fused kernels be those of another device.

    Args:
        backend: cuda | rocm | mps | xpu.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # of kernels that are overridden
            for name in (*_FP32, *_FP32_BY_DEFAULT, *(() if backend == "mps" else _FP32_WITHOUT_METAL)):
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(_aten, packet), overload or "default")
                library.impl(name, _in_fp32(operator, name in _FP32_BY_DEFAULT), "AutocastCPU")
            library.impl("scaled_dot_product_attention", _attention_without_dropout, "AutogradCPU")
            if backend != "mps":
                library.impl("dropout", _fused_dropout, "AutogradCPU")
            if backend in ("cuda", "rocm"):
                library.impl("rms_norm", _fused_rms_norm, "AutogradCPU")
        yield
    finally:
        del library  # the kernels end with the only reference to it


_AUTOCAST = Part.ACCELERATOR.replaces(
    "torch:is_autocast_enabled",
    why="without a device it asks for CUDA's autocast, which is the CPU's here",
    until="fake CUDA tensors run on builds without CUDA",
)


def named_cuda_autocast() -> AbstractContextManager:
    """Answer code that asks for CUDA's autocast, which the CPU's stands for, as on CUDA.

    Without an argument torch.is_autocast_enabled() asks so, whatever device the tensors are on: peft converts the
    inputs of quantized layers where it says no.
    """
    enabled = _AUTOCAST.original("is_autocast_enabled")

    def answered(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    return _AUTOCAST.replaced(is_autocast_enabled=answered)


def foreach_optimizers() -> AbstractContextManager:
    """torch's optimizers over lists of tensors (foreach), their default on an accelerator: with temporaries of all
    weights at once."""

    def choose(optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                # Adam's falls back to a loop for such a learning rate.
                group["foreach"] = not isinstance(group["lr"], torch.Tensor) or bool(group.get("capturable"))

    return register_optimizer_step_pre_hook(choose)


def _in_fp32(operator, by_default: bool) -> Callable:
    def compute(*args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            if not by_default:
                return operator(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})
            has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
            if not has_dtype and args[0].dtype in _HALVES:
                kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return compute


def _wide(value):
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value


def _attention_without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
    """Attention without dropout, for which the CPU would store all scores. Flash attention draws it in the kernel."""
    return _aten.scaled_dot_product_attention.default.decompose(query, key, value, attn_mask, 0.0, *args, **kwargs)


def _fused_dropout(input, probability, train):
    """One kernel that keeps a mask of a byte an element (is_fused_kernel_acceptable in ATen/native/Dropout.cpp); the
    CPU draws noise in the input's type, scales it, multiplies with it and keeps it."""
    if not train or probability == 0 or not input.numel():
        return input
    if probability == 1:
        return _aten.dropout.default.decompose(input, probability, train)
    return torch.native_dropout(input, probability, True)[0]


def _fused_rms_norm(input, normalized_shape, weight=None, eps=None):
    """One kernel (rms_norm_symint in ATen/native/layer_norm.cpp) that keeps its input and a number a row; the CPU's
    operators keep the input in fp32 and two more tensors of its size."""
    if input.is_complex() or (weight is not None and weight.dtype is not input.dtype):
        return _aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)
    return _RMSNorm.apply(input, normalized_shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """torch's own formula for that kernel, which it has for devices with the kernel only."""

    @staticmethod
    def forward(ctx, input, shape, weight, eps):
        with torch._C._AutoDispatchBelowAutograd():  # above, the CPU's operators would take its place
            out, scales = _aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, scales)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx, gradient):
        input, weight, scales = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_input, of_weight = _aten._fused_rms_norm_backward(gradient, input, ctx.shape, scales, weight, needed)
        return of_input, None, of_weight, None
