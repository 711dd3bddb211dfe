"""The memory that each version of flash attention allocates in its backward, beside the gradients.

Forward of every version allocates the output and the fp32 log-sum-exp, and saves them with queries, keys and values.
From the source of Dao-AILab/flash-attention at 0251105a (August 2026); not measured on a GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_memopt.errors import InputError

_FP32 = torch.float32


class Attention(NamedTuple):
    """One call of flash attention.

    Attributes:
        sequences: in the batch.
        queries, keys: tokens of a sequence, or of all sequences if `ragged`.
        heads, kv_heads: of queries, and of keys and values.
        head_size: a multiple of 8.
        dtype: of queries, keys and values.
        causal: tokens attend to earlier ones only.
        ragged: sequences of different lengths follow each other in one dimension (the varlen functions).
        capability: compute capability of the device.
    """

    sequences: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    causal: bool
    ragged: bool
    capability: float


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _second(call: Attention) -> list[torch.Tensor]:
    """FlashAttention-2: mha_bwd and mha_varlen_bwd of csrc/flash_attn/flash_api.cpp (not `deterministic`).

    softmax_d, dq_accum, and for grouped queries keys' and values' gradients for every head of the queries.
    """
    size = round_up(call.head_size, 32 if call.head_size <= 128 else 64)
    rows = call.queries + 128 * call.sequences if call.ragged else call.sequences * round_up(call.queries, 128)
    tensors = [torch.empty(call.heads, rows, dtype=_FP32), torch.empty(rows, call.heads, size, dtype=_FP32)]
    if call.kv_heads != call.heads:
        keys = call.keys if call.ragged else call.sequences * call.keys
        tensors += [torch.empty(keys, call.heads, call.head_size, dtype=call.dtype) for _ in range(2)]
    return tensors


def _third(call: Attention) -> list[torch.Tensor]:
    """FlashAttention-3: mha_bwd of hopper/flash_api.cpp, on Hopper.

    softmax_d, softmax_lse_log2, dq_accum, and for grouped queries dk_accum and dv_accum, all in fp32; dq_semaphore.
    """
    size = next(size for size in (64, 96, 128, 192, 256) if call.head_size <= size)  # round_up_headdim
    rows = _hopper_rows(call, size)
    columns = 128 if size <= 128 else 96 if size <= 192 else 80
    blocks = -(-call.queries // rows) * (1 if call.ragged else call.sequences)
    return [*_accumulators(call, rows, columns, size), torch.empty(blocks, call.heads, dtype=torch.int32)]


def _fourth(call: Attention) -> list[torch.Tensor]:
    """FlashAttention-4: _flash_attn_bwd of flash_attn/cute/interface.py.

    dpsum, lse_log2, dq_accum, and for grouped queries dk_accum and dv_accum, all in fp32. The kernel for heads of 256
    on Blackwell has dpsum and lse_log2 only.
    """
    size = round_up(call.head_size, 32)
    if call.capability < 10:
        columns = 128 if size <= 128 else 96 if size <= 192 else 64  # _tile_size_bwd_sm90
        return _accumulators(call, _hopper_rows(call, size), columns, size)
    if call.capability >= 12:
        return _accumulators(call, 64, 64, size)
    columns = 256 if call.head_size >= 128 else 128  # two blocks of a cluster from heads of 128 on
    tensors = _accumulators(call, 128, columns, size)
    return tensors[:2] if call.head_size == 256 else tensors


def _hopper_rows(call: Attention, size: int) -> int:
    """Queries in a block: kBlockM_sm90, which FlashAttention-4 has taken over."""
    return 128 if size <= 64 else 80 if 96 < size <= 128 and not call.causal else 64


def _accumulators(call: Attention, rows: int, columns: int, size: int) -> list[torch.Tensor]:
    """In fp32, for blocks of `rows` queries and `columns` keys: two numbers and `size` numbers for each query and
    head, and, for grouped queries, twice `size` numbers for each key and head."""

    def padded(tokens: int, block: int) -> int:
        if call.ragged:
            return round_up(tokens + call.sequences * block, block)
        return call.sequences * round_up(tokens, block)

    queries = padded(call.queries, rows)
    tensors = [torch.empty(call.heads * queries * width, dtype=_FP32) for width in (1, 1, size)]
    if call.kv_heads != call.heads:
        keys = padded(call.keys, columns)
        tensors += [torch.empty(call.kv_heads * keys * size, dtype=_FP32) for _ in range(2)]
    return tensors


# Key of hardware.attention.FLASH -> what its backward allocates.
BACKWARD: dict[str, Callable[[Attention], list[torch.Tensor]]] = {
    "flash_attention_2": _second,
    "flash_attention_3": _third,
    "flash_attention_4": _fourth,
}


def check_call(flash: str, dtype: torch.dtype, head_size: int, capability: float) -> None:
    """Refuse tensors that a kernel refuses.

    Raises:
        InputError: they are not in 16 bits, or their heads are too large.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise InputError(f"attn_implementation={flash!r} takes 16 bits, not {dtype}: set bf16=true or dtype=bfloat16")
    # _validate_head_dims of flash_attn/cute/interface.py; the versions before take up to 256 everywhere.
    limited = flash == "flash_attention_4" and int(capability) in (10, 11) and head_size != 256
    if head_size > (128 if limited else 256):
        raise InputError(
            f"attn_implementation={flash!r} takes no heads of {head_size}: use attn_implementation='sdpa'"
        )
