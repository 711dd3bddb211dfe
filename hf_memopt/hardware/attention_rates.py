"""The rate of attention kernels: what each kernel reaches of a card's 16-bit rate, by head size and length.

Curves flatten with the number of keys that a query sees, and backward is slower than forward: figures 5 and 6 of the
FlashAttention-3 paper (Shah et al. 2024, H100) and 4 to 7 of FlashAttention-2's (Dao 2023, A100).
"""

from dataclasses import dataclass
from functools import cache

from hf_memopt.hardware.attention import flash_attention
from hf_memopt.hardware.catalog import Hardware, catalog_tables

# Keys that a query sees at which a kernel reaches half of its rate: with heads of 128 on an H100, causal curves of
# FlashAttention-2 and cuDNN follow keys / (keys + 200) within 7 % (tests/test_attention_rates.py).
HALF = 200
EFFICIENT = "memory-efficient"  # what torch takes for 32 bits, for masks, and before Ampere
CUDNN = "cuDNN"  # what torch 2.11 and later take on Hopper and B200, with masks too (transformers PR 48163)
OTHER = "another vendor's"


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """Shares of the 16-bit rate that a kernel reaches with many keys.

    Attributes:
        kernel: a key of attention.FLASH, CUDNN, EFFICIENT or OTHER.
        element: bytes of a query's element.
        lowest, highest: CUDA compute capability.
        head_size: the largest for which the row holds.
    """

    kernel: str
    forward: float
    backward: float
    source: str
    element: int = 2
    lowest: float = 0.0
    highest: float = 99.0
    head_size: int = 512


@cache
def rates() -> list[AttentionRate]:
    """The catalog's rows; the first that fits counts."""
    return [AttentionRate(**row) for row in catalog_tables()["attention"]]


def attention_kernel(device: Hardware, implementation: str | None, element: int, masked: bool) -> str:
    """The kernel that an `attn_implementation` runs.

    Args:
        element: bytes of a query's element.
        masked: by a tensor.
    """
    if device.backend != "cuda":
        return OTHER
    if flash := flash_attention(implementation):
        return flash
    if element == 4 or device.capability < 8:
        return EFFICIENT
    if 9 <= device.capability < 11:
        return CUDNN
    return EFFICIENT if masked else "flash_attention_2"


def attention_rate(device: Hardware, kernel: str, element: int, head_size: int, keys: int, backward: bool) -> float:
    """The share of a device's 16-bit rate that an attention kernel reaches.

    Args:
        keys: that a query sees.
    """
    wide = 4 if element > 2 else 2  # only the memory-efficient kernel has rows for 32 bits
    fitting = [row for row in _rows(device, kernel, wide if kernel == EFFICIENT else 2) if head_size <= row.head_size]
    # For larger heads than a kernel has torch takes the memory-efficient one.
    row = (fitting or _rows(device, EFFICIENT, wide))[0]
    return (row.backward if backward else row.forward) * keys / (keys + HALF)


def _rows(device: Hardware, kernel: str, element: int) -> list[AttentionRate]:
    """A kernel's rows for a device, by head size."""
    own = (row for row in rates() if row.kernel == kernel and row.element == element)
    return [row for row in own if row.lowest <= device.capability <= row.highest]
