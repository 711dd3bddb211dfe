"""Flex attention in a trace: allocate on fake CPU tensors what its kernels and block mask allocate on a GPU.

From the source of torch 2.13 (`nn.attention.flex_attention`, `_higher_order_ops.flex_attention`) and transformers
5.23; not measured on a GPU.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from unittest import mock

import torch

from hf_memopt.errors import InputError
from hf_memopt.estimator.patches.math_attention import FUSED
from hf_memopt.hardware import Hardware
from hf_memopt.levers import attention_pattern

_BLOCK = 128  # tokens: flex_attention._DEFAULT_SPARSE_BLOCK_SIZE


def runs_flex(device: Hardware) -> bool:
    """True if attention patterns use flex attention on a device (attention_pattern.uses_flex)."""
    return device.backend in ("cuda", "rocm")


class _BlockMask:
    """A BlockMask's int32 tensors: partially masked and unmasked blocks, by rows and by columns."""

    def __init__(self, batch: int, rows: int, columns: int) -> None:
        self.tensors = [
            torch.empty(batch, 1, *shape, dtype=torch.int32)
            for outer, inner in ((rows, columns), (columns, rows))
            for shape in ((outer,), (outer, inner)) * 2
        ]


@contextmanager
def counted_flex_attention() -> Iterator[None]:
    """Make attn_implementation="flex_attention" and attention patterns allocate what flex attention allocates.

    Forward saves the queries, keys, values, output and log-sum-exp, as flash attention does, and the block mask.
    Backward is counted as flash attention's, an upper bound: flex attention has no fp32 accumulator of dq.
    """
    with mock.patch.object(attention_pattern, "uses_flex", lambda device: True), own_attention() as (attention, masks):
        attention["flex_attention"], masks["flex_attention"] = _attend, _mask
        yield


@contextmanager
def own_attention() -> Iterator[tuple[MutableMapping, MutableMapping]]:
    """transformers' functions that attend, and those that make masks, by `attn_implementation`: what is set in here
    takes precedence over what is registered, and is dropped again."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    before = [dict(table) for table in tables]
    try:
        yield tables
    finally:
        for table, functions in zip(tables, before, strict=True):
            for name in [name for name, function in table.items() if functions.get(name) is not function]:
                with suppress(KeyError):  # registered while the context lasted, permanently
                    del table[name]
                if name in functions and table.get(name) is not functions[name]:  # set by somebody else before
                    table[name] = functions[name]


def _mask(*, batch_size, q_length, kv_length, **kwargs) -> _BlockMask:
    return _BlockMask(batch_size, -(-q_length // _BLOCK), -(-kv_length // _BLOCK))


def _attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
    if kwargs.get("dropout"):  # flex_attention_forward refuses it
        raise InputError("attn_implementation='flex_attention' has no dropout: use attn_implementation='sdpa'")
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    if grouped := not heads & (heads - 1):  # for other head counts transformers repeats keys and values
        groups = 1
    output = FUSED(
        query, _repeated(key, groups), _repeated(value, groups), is_causal=True, scale=scaling, enable_gqa=grouped
    )
    if output.grad_fn is not None:
        output.grad_fn.metadata["block mask"] = attention_mask  # which flex attention saves for backward
    return output.transpose(1, 2).contiguous(), None


def _repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    """Keys or values (batch, heads, tokens, size), repeated where transformers repeats them."""
    if times == 1:
        return heads
    batch, count, tokens, size = heads.shape
    return heads[:, :, None].expand(batch, count, times, tokens, size).reshape(batch, count * times, tokens, size)
