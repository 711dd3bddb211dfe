"""Attention's rates against published curves, and the kernel that each implementation runs."""

import itertools

import pytest

from hf_memopt.hardware import get_hardware
from hf_memopt.hardware.attention_kernels import CUDNN, EFFICIENT, OTHER, attention_kernel, attention_rate, rates
from hf_memopt.hardware.catalog import catalog

FLASH_2, FLASH_3 = "flash_attention_2", "flash_attention_3"
# Card, kernel, head size, backward, TFLOP/s by the number of keys that a query sees (half under a causal mask).
PUBLISHED = [
    # Shah et al. 2024 (FlashAttention-3), figures 5 (forward, causal, 512 to 16k tokens) and 6 (backward, not causal)
    ("h100_80gb", FLASH_2, 128, False, {256: 191, 512: 260, 1024: 298, 2048: 319, 4096: 333, 8192: 335}),
    ("h100_80gb", CUDNN, 128, False, {256: 315, 512: 410, 1024: 484, 2048: 518, 4096: 529, 8192: 539}),
    ("h100_80gb", FLASH_3, 128, False, {512: 423, 1024: 521, 2048: 579, 4096: 602, 8192: 616}),
    ("h100_80gb", FLASH_2, 256, False, {256: 208, 512: 251, 1024: 278, 2048: 293, 4096: 297, 8192: 298}),
    ("h100_80gb", FLASH_2, 128, True, {512: 214, 1024: 260, 2048: 291, 4096: 310, 8192: 318, 16384: 322}),
    ("h100_80gb", CUDNN, 128, True, {1024: 408, 2048: 465, 4096: 499, 8192: 518, 16384: 516}),
    ("h100_80gb", FLASH_3, 128, True, {1024: 424, 2048: 501, 4096: 542, 8192: 559, 16384: 561}),
    # gpu-mode/ring-attention issue 10; Dao-AILab/flash-attention issue 1589
    ("rtx_a5000", FLASH_2, 64, False, {2048: 81, 8192: 82}),
    ("rtx_a5000", FLASH_2, 64, True, {2048: 70, 8192: 77}),
    ("b200", FLASH_2, 64, True, {2048: 302, 8192: 329}),
]


def test_rates_follow_published_curves(subtests):
    for card, kernel, head, backward, curve in PUBLISHED:
        with subtests.test(
            card=str(card), kernel=str(kernel), head=str(head), backward=str(backward), curve=str(curve)
        ):
            device = get_hardware(card)
            for keys, published in curve.items():
                share = attention_rate(device, kernel, 2, head, keys, backward)
                assert share * device.bf16_flops / 1e12 == pytest.approx(published, rel=0.2)


_RUNS = [
    *(("a100_80gb", None, 2, False, FLASH_2), ("a100_80gb", "sdpa", 2, True, EFFICIENT)),
    *(("a100_80gb", "sdpa", 4, False, EFFICIENT), ("t4", "sdpa", 2, False, EFFICIENT)),
    *(("h100_80gb", "sdpa", 2, True, CUDNN), ("h100_80gb", "flash_attention_2", 2, False, FLASH_2)),
    *(("h100_80gb", "kernels-community/flash-attn3", 2, False, FLASH_3), ("rtx_5090", "sdpa", 2, False, FLASH_2)),
    ("mi300x", "sdpa", 4, False, OTHER),
]


def test_what_each_implementation_runs(subtests):
    for card, implementation, element, masked, kernel in _RUNS:
        with subtests.test(
            card=str(card),
            implementation=str(implementation),
            element=str(element),
            masked=str(masked),
            kernel=str(kernel),
        ):
            assert attention_kernel(get_hardware(card), implementation, element, masked) == kernel


def test_every_card_has_a_rate_for_what_it_runs():
    for card in (
        *("gtx_1080", "t4", "v100_32gb", "a100_80gb", "rtx_4090", "h100_80gb", "b200", "b300_sxm_288gb", "mi300x"),
    ):
        device = get_hardware(card)
        for element in (2, 4):
            kernel = attention_kernel(device, None, element, False)
            assert 0 < attention_rate(device, kernel, element, 512, 4096, True) < 1
    assert all(row.source for row in rates())


def test_every_kernel_has_a_rate_on_every_card_whatever_its_heads():
    for device in catalog().values():
        for implementation, element, masked in itertools.product(
            (None, "sdpa", "eager", "flash_attention_2"), (1, 2, 4, 8), (False, True)
        ):
            kernel = attention_kernel(device, implementation, element, masked)
            for head_size, backward in itertools.product((16, 128, 192, 256, 512, 1024), (False, True)):
                assert 0 < attention_rate(device, kernel, element, head_size, 64, backward) < 1
