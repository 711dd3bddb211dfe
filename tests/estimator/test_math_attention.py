"""sdpa where no fused kernel of CUDA takes the tensors: torch's math kernel, as a trace counts it."""

import itertools

import pytest
import torch
from transformers import AutoConfig

from hf_memopt import estimate
from hf_memopt.estimator.patches.math_attention import _attend, is_fused

HALF, WIDE = torch.float16, torch.float32
LAYERS, HEADS, LENGTH, ROWS = 2, 8, 2048, 1


_TAKEN = [
    (HALF, True, 9.0, True),
    (HALF, True, 8.0, True),
    (HALF, True, 7.5, False),  # a T4: the memory-efficient kernel takes no groups
    (HALF, False, 7.5, True),
    (torch.bfloat16, True, 0.0, True),  # ROCm
    *((WIDE, True, 9.0, False), (WIDE, False, 9.0, True), (WIDE, False, 7.0, True), (WIDE, True, None, False)),
]


def test_which_tensors_a_fused_kernel_takes(subtests):
    for dtype, grouped, capability, expected in _TAKEN:
        with subtests.test(dtype=str(dtype), grouped=str(grouped), capability=str(capability), expected=str(expected)):
            assert is_fused(dtype, grouped, capability) is expected


def test_computes_what_torchs_kernel_does():
    """Of three dimensions and of four, of heads and of groups of them, with masks of booleans and of numbers."""
    asked = itertools.product((HALF, WIDE), (None, bool, float), (False, True), (1, 2, 8), (None, 0.3), ((), (2,)))
    for dtype, kind, causal, heads, scale, batch in asked:
        if kind and causal:
            continue
        generator = torch.Generator().manual_seed(heads)
        query, key, value = (torch.randn(*batch, n, 9, 16, generator=generator).to(dtype) for n in (8, heads, heads))
        mask = torch.rand(*batch, 1, 9, 9, generator=generator) > 0.3 if kind else None
        bias = None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
        settings = {"scale": scale, "enable_gqa": heads < 8}
        expected, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, bias, 0.0, causal, **settings
        )
        found = _attend(query, key, value, mask if kind is bool else bias, 0.0, causal, scale, 8 // heads)
        assert found.dtype == dtype and torch.allclose(found, expected, atol=1e-6 if dtype == WIDE else 1e-3)


def test_drops_what_is_asked_for():
    ones = torch.ones(1, 1, 400, 4)
    kept, dropped, none = (_attend(ones, ones, ones, None, share, False, None, 1) for share in (0.0, 0.5, 1.0))
    assert torch.allclose(kept, ones) and not none.any()
    assert dropped.unique().numel() > 1 and dropped.mean() == pytest.approx(1, abs=0.05)


def activations(hardware: str, groups: int, attention: str = "sdpa", **fields) -> int:
    """Bytes of activations of a model with little beside attention, at the peak."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": 64}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // groups}
    config = AutoConfig.for_model("llama", **sizes, **heads, max_position_embeddings=LENGTH)
    fields |= {"per_device_train_batch_size": ROWS}
    found = estimate(config, fields, LENGTH, hardware, attn_implementation=attention)
    return found.breakdown["activations"]


SCORES = LAYERS * ROWS * HEADS * LENGTH**2  # elements of the scores that all layers keep


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("hardware", "fields"), [("t4", {"fp16": True}), ("h100_80gb", {}), ("v100_pcie_16gb", {"fp16": True})]
)
def test_scores_of_grouped_heads_are_kept_in_fp32(hardware, fields):
    grouped, whole = activations(hardware, 2, **fields), activations(hardware, 1, **fields)
    # Of one layer's backward beside the two that are kept: scores of 4 bytes, and the mask of a byte.
    assert 8 * SCORES < grouped < 10 * SCORES and whole < SCORES / 10


@pytest.mark.parametrize(("hardware", "fields"), [("h100_80gb", {"bf16": True}), ("rtx_3060", {"fp16": True})])
def test_flash_attention_takes_groups_and_keeps_no_scores(hardware, fields):
    assert activations(hardware, 2, **fields) < SCORES
