"""Flex attention in a trace: allocate on fake CPU tensors what its kernels and block mask allocate on a GPU.

From the source of torch 2.13 (`nn.attention.flex_attention`, `_higher_order_ops.flex_attention`) and transformers
5.23; not measured on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from hf_memopt.errors import InputError
from hf_memopt.estimator.patches.replacement import all_replaced
from hf_memopt.hardware import Hardware

_BLOCK = 128  # tokens: flex_attention._DEFAULT_SPARSE_BLOCK_SIZE


def runs_flex(device: Hardware) -> bool:
    """Whether attention patterns use flex attention on a device (attention_pattern.uses_flex)."""
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
    lever = "hf_memopt.levers.attention_pattern"
    stand_ins = {"uses_flex": lambda device: True, "flex_mask": _mask, "flex_attend": _attend}
    attention, masks = attention_tables()
    with (
        all_replaced({f"{lever}:{name}": stand_in for name, stand_in in stand_ins.items()}),
        mock.patch.dict(attention, flex_attention=_attend),
        mock.patch.dict(masks, flex_attention=_mask),
    ):
        yield


def attention_tables() -> tuple[dict, dict]:
    """transformers' functions that attend, and those that make masks, by `attn_implementation`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS._global_mapping, ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


def _mask(*, batch_size, q_length, kv_length, **kwargs) -> _BlockMask:
    return _BlockMask(batch_size, -(-q_length // _BLOCK), -(-kv_length // _BLOCK))


def _attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
    from transformers.integrations.flex_attention import repeat_kv

    if kwargs.get("dropout"):  # flex_attention_forward refuses it
        raise InputError("attn_implementation='flex_attention' has no dropout: use attn_implementation='sdpa'")
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    if grouped := not heads & (heads - 1):  # for other head counts transformers repeats keys and values
        groups = 1
    output = torch.nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, groups), repeat_kv(value, groups), is_causal=True, scale=scaling, enable_gqa=grouped
    )
    if output.grad_fn is not None:
        output.grad_fn.metadata["block mask"] = attention_mask  # which flex attention saves for backward
    return output.transpose(1, 2).contiguous(), None
