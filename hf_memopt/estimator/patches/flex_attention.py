"""Flex attention in a trace: what its kernels and its block mask keep on a card, on fake CPU tensors.

Read in torch 2.13 (`nn.attention.flex_attention`, `_higher_order_ops.flex_attention`) and transformers 5.23, not
measured on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_memopt.estimator.patches.replacement import all_replaced
from hf_memopt.hardware import Hardware

_BLOCK = 128  # tokens: flex_attention._DEFAULT_SPARSE_BLOCK_SIZE


def runs_flex(device: Hardware) -> bool:
    """Whether levers attend through flex attention on a device (attention_pattern.uses_flex)."""
    return device.backend in ("cuda", "rocm")


class _BlockMask:
    """A BlockMask's tensors: which blocks are masked in part and which not at all, by rows and by columns (int32)."""

    def __init__(self, batch: int, rows: int, columns: int) -> None:
        self.tensors = [
            torch.empty(batch, 1, *shape, dtype=torch.int32)
            for one, other in ((rows, columns), (columns, rows))
            for shape in ((one,), (one, other)) * 2
        ]


@contextmanager
def counted_flex_attention() -> Iterator[None]:
    """Have levers' attention allocate as flex attention does.

    It saves what flash attention saves (queries, keys, values, the output, the log-sum-exp of every query) and the
    block mask. Backward is counted as flash attention's, which takes more: flex attention has no fp32 sum of dq.
    """
    lever = "hf_memopt.levers.attention_pattern"
    stand_ins = {"uses_flex": lambda device: True, "flex_mask": _mask, "flex_attend": _attend}
    with all_replaced({f"{lever}:{name}": stand_in for name, stand_in in stand_ins.items()}):
        yield


def _mask(*, batch_size, q_length, kv_length, **kwargs) -> _BlockMask:
    return _BlockMask(batch_size, -(-q_length // _BLOCK), -(-kv_length // _BLOCK))


def _attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
    from transformers.integrations.flex_attention import repeat_kv

    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    if grouped := not heads & (heads - 1):  # transformers repeats keys and values for other numbers of heads
        groups = 1
    output = torch.nn.functional.scaled_dot_product_attention(
        query, repeat_kv(key, groups), repeat_kv(value, groups), is_causal=True, scale=scaling, enable_gqa=grouped
    )
    if output.grad_fn is not None:
        output.grad_fn.metadata["block mask"] = attention_mask  # which flex attention saves for backward
    return output.transpose(1, 2).contiguous(), None
