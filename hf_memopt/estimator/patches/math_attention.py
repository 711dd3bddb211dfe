"""torch's math kernel of sdpa in a trace: what CUDA runs where no fused kernel takes the tensors.

torch's CUDA kernels (2.13, ATen/native/transformers/cuda/sdp_utils.cpp): flash attention and cuDNN's take groups of
heads (GQA), of 16 bits from compute capability 8.0 on; the memory-efficient kernel takes fp32 and older cards, but no
groups. transformers passes groups wherever there is no mask (use_gqa_in_sdpa), so that models with GQA keep scores of
tokens × tokens there. Measured on an H200: benchmarks/results/gpu/h200, "full 0.5B, fp32".
"""

from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch.nn import functional

FUSED = functional.scaled_dot_product_attention  # as imported: what a trace may replace
_HALVES = (torch.bfloat16, torch.float16)
_FLASH = 8.0  # the lowest compute capability of fused kernels of 16 bits that take groups


def is_fused(dtype: torch.dtype, grouped: bool, capability: float | None) -> bool:
    """True if a fused kernel takes queries of a dtype. A trace has no fp16 in autocast, so that bf16 below 8.0, for
    which there is none, is taken for fp16.

    Args:
        grouped: several heads of the queries share one of the keys.
        capability: CUDA compute capability; None or 0 for a card that has none (ROCm's), which takes all 16 bits.
    """
    return not grouped or (dtype in _HALVES and takes_groups(capability))


def takes_groups(capability: float | None) -> bool:
    """True if a device has a fused kernel that takes groups of heads, in 16 bits."""
    return not capability or capability >= _FLASH


def counted_math_attention(capability: float | None) -> AbstractContextManager:
    """Have sdpa allocate what the math kernel does where no fused one takes the tensors.

    Args:
        capability: CUDA compute capability of the device.
    """

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        dtype = query.dtype
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
        groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        if is_fused(dtype, groups > 1, capability):
            return FUSED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        tensors = [each.to(dtype) for each in (query, key, value)]
        with torch.autocast(query.device.type, enabled=False):
            return _attend(*tensors, attn_mask, dropout_p, is_causal, scale, groups)

    return mock.patch.object(functional, "scaled_dot_product_attention", attention)


def _attend(query, key, value, mask, dropout, is_causal, scale, groups):
    """_scaled_dot_product_attention_math of ATen/native/transformers/attention.cpp: in fp32, whatever comes in."""
    dtype = query.dtype
    query, key, value = (each.float() if dtype in _HALVES else each for each in (query, key, value))
    factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5  # half of it to each side
    query = query * factor
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if groups > 1:
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    scores = query @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        scores += mask
    # _safe_softmax of ATen/native/SoftMax.cpp: beside its result a softmax, and a mask of what is masked.
    with torch.no_grad():
        beside = scores.new_empty(scores.shape), scores.new_empty(scores.shape, dtype=torch.bool)
    weights = torch._safe_softmax(scores, -1)
    del beside
    del scores
    dropped = functional.dropout(weights, dropout) if dropout else weights
    output = dropped @ value
    if dtype not in _HALVES:
        return output
    with torch.no_grad():
        weights.to(dtype)  # which the kernel returns, too, and nobody takes
    return output.to(dtype)
