"""What is proposed where nothing fits: which proposals are estimated, and which their sketch suffices for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hf_memopt.planner.choices import Choice
from hf_memopt.planner.nearest import Combination, _confirmed, _needs
from hf_memopt.units import GIB

ZERO3 = Choice("zero3", 1, 16, 1.0, "adamw_torch_fused", "bfloat16")
SKETCH = SimpleNamespace(device_bytes=lambda choice, length: (12 * GIB, GIB), outside_layers=GIB)


def combination(choice: Choice, sketched: int) -> Combination:
    request = SimpleNamespace(memory_budget=20 * GIB)
    return Combination({"devices": 3}, ["8 × cards, strategy zero3"], request, choice, sketched)


def test_zero3_gathers_what_is_outside_the_layers():
    assert _needs(SKETCH, ZERO3, 1) == 14 * GIB
    assert _needs(SKETCH, replace(ZERO3, strategy="fsdp2"), 1) == 12 * GIB


@pytest.mark.parametrize(
    ("choice", "gibs", "certain"),
    [
        (ZERO3, 16, True),
        (ZERO3, 18, False),
        (replace(ZERO3, strategy="zero3_offload_cpu"), 5, False),
        (replace(ZERO3, strategy="fsdp2"), 5, False),
    ],
)
def test_only_deepspeed_far_below_the_limit_needs_no_estimate(choice, gibs, certain):
    assert combination(choice, gibs * GIB).certain == certain


def test_a_sketch_says_about():
    assert _confirmed([combination(ZERO3, 16 * GIB)]) == ["8 × cards, strategy zero3: about 16.00 GiB"]
