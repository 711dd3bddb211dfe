"""Collectives: rates of rings against published bus bandwidths, and what waits besides."""

import dataclasses

import pytest

from hf_memopt.hardware import get_hardware
from hf_memopt.hardware.catalog import _boxes, box_of, catalog
from hf_memopt.hardware.links import Links

# Card, ranks, GB/s that nccl-tests or all_reduce_bench.py report as bus bandwidth with large messages.
PUBLISHED = [
    ("a100_80gb", 8, 235, "stas00/ml-engineering, network/README.md"),
    ("h200", 8, 361, "stas00/ml-engineering, network/README.md: all-gather"),
    ("h200", 8, 363, "stas00/ml-engineering, network/README.md: reduce-scatter"),
    ("b200", 32, 382, "stas00/ml-engineering, network/README.md: 4 boxes"),
    ("h100_80gb", 256, 340, "NVIDIA/nccl issue 1218: 32 boxes, all-reduce"),
    ("mi300x", 8, 313, "stas00/ml-engineering, network/README.md"),
    ("mi300x", 2, 47.7, "stas00/ml-engineering, network/README.md"),
    ("rtx_5090", 8, 28, "NVIDIA/nccl issue 1639"),
    ("rtx_5090", 4, 35, "NVIDIA/nccl issue 1639"),
    ("rtx_pro_6000_workstation", 8, 40, "voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md"),
]


def test_rings_reach_the_published_bandwidth(subtests):
    for card, ranks, published, source in PUBLISHED:
        with subtests.test(card=str(card), ranks=str(ranks), published=str(published), source=str(source)):
            assert Links(get_hardware(card), ranks).rate(ranks) / 1e9 == pytest.approx(published, rel=0.25), source


def test_boxes_name_cards_of_the_catalog_and_sources():
    assert all(name in catalog() for name in _boxes() if name)
    assert all(box.source and box.adapters and box.adapter for box in _boxes().values())
    assert not box_of(get_hardware("rtx_4090")).switched


def test_a_boxs_adapters_carry_its_bytes_together():
    """A byte enters a box once, over one of eight adapters: two boxes are no eight times slower than one."""
    one, two = (Links(get_hardware("a100_80gb"), ranks).seconds(1e9) for ranks in (8, 16))
    assert one < two < 2 * one
    few = Links(get_hardware("l40s"), 16)
    assert few.rate(16) < few.rate(8)


def test_a_bridge_joins_two_cards_and_no_more():
    card = get_hardware("rtx_3090")
    assert Links(card, 2).rate(2) > Links(card, 4).rate(4)
    assert Links(dataclasses.replace(card, peer_link=card.host_link), 2).rate(2) == Links(card, 4).rate(4)
