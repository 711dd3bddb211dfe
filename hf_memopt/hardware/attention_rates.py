"""The rate of attention kernels: what each kernel reaches of a card's 16-bit rate, by head size and length.

Curves flatten with the number of keys that a query sees, and backward is slower than forward: figures 5 and 6 of the
FlashAttention-3 paper (Shah et al. 2024, H100) and 4 to 7 of FlashAttention-2's (Dao 2023, A100).
"""

from dataclasses import dataclass

from hf_memopt.hardware.attention import flash_attention
from hf_memopt.hardware.catalog import Hardware

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


_FA3 = "Shah et al. 2024 (FlashAttention-3), figures 5 and 6: H100"
_FA2 = "Dao 2023 (FlashAttention-2), figures 5 and 6: A100"
_XFORMERS = "A100: facebookresearch/xformers PR 389 (forward, heads of 128), 557 and 587 (backward)"
_FLASH_2, _FLASH_3, _FLASH_4 = "flash_attention_2", "flash_attention_3", "flash_attention_4"
# The first row that fits counts.
RATES = (
    AttentionRate(kernel=_FLASH_2, lowest=9, highest=9.9, head_size=64, forward=0.33, backward=0.30, source=_FA3),
    AttentionRate(kernel=_FLASH_2, lowest=9, highest=9.9, head_size=128, forward=0.35, backward=0.33, source=_FA3),
    AttentionRate(
        kernel=_FLASH_2, lowest=9, highest=9.9, forward=0.32, backward=0.26, source=f"{_FA3}; backward assumed"
    ),
    AttentionRate(
        kernel=_FLASH_2,
        lowest=10,
        highest=11.9,
        forward=0.17,
        backward=0.15,
        source="B200, heads of 64: Dao-AILab/flash-attention issue 1589",
    ),
    AttentionRate(
        kernel=_FLASH_2,
        lowest=8.6,
        forward=0.74,
        backward=0.7,
        source="RTX A5000, heads of 64: gpu-mode/ring-attention issue 10; assumed of other desktop architectures",
    ),
    AttentionRate(kernel=_FLASH_2, head_size=64, forward=0.62, backward=0.54, source=_FA2),
    AttentionRate(kernel=_FLASH_2, forward=0.7, backward=0.61, source=_FA2),
    AttentionRate(kernel=_FLASH_3, head_size=64, forward=0.50, backward=0.48, source=_FA3),
    AttentionRate(kernel=_FLASH_3, head_size=128, forward=0.65, backward=0.57, source=_FA3),
    AttentionRate(kernel=_FLASH_3, forward=0.7, backward=0.57, source=f"{_FA3}; backward as of heads of 128"),
    AttentionRate(kernel=CUDNN, highest=9.9, head_size=64, forward=0.42, backward=0.43, source=_FA3),
    AttentionRate(kernel=CUDNN, highest=9.9, forward=0.58, backward=0.52, source=_FA3),
    AttentionRate(kernel=CUDNN, forward=0.6, backward=0.5, source="assumed of Blackwell: as on Hopper"),
    AttentionRate(kernel=_FLASH_4, forward=0.6, backward=0.5, source="assumed: as cuDNN on Blackwell"),
    AttentionRate(kernel=EFFICIENT, highest=8.9, forward=0.35, backward=0.19, source=_XFORMERS),
    AttentionRate(
        kernel=EFFICIENT, forward=0.17, backward=0.09, source="assumed: half of an A100's share, whose kernel it is"
    ),
    AttentionRate(kernel=EFFICIENT, element=4, highest=8.9, forward=0.083, backward=0.047, source=_XFORMERS),
    AttentionRate(
        kernel=EFFICIENT,
        element=4,
        forward=0.041,
        backward=0.023,
        source="assumed: half of an A100's share, whose kernel it is",
    ),
    AttentionRate(
        kernel=OTHER, forward=0.45, backward=0.45, source="assumed: as far below an MI300X's matmuls as on an A100"
    ),
)


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
    return EFFICIENT if masked else _FLASH_2


def attention_rate(device: Hardware, kernel: str, element: int, head_size: int, keys: int, backward: bool) -> float:
    """The share of a device's 16-bit rate that an attention kernel reaches.

    Args:
        keys: that a query sees.
    """
    row = next(
        row
        for row in RATES
        if row.kernel == kernel
        and row.element == (element if kernel == EFFICIENT else 2)
        and row.lowest <= device.capability <= row.highest
        and head_size <= row.head_size
    )
    return (row.backward if backward else row.forward) * keys / (keys + HALF)
