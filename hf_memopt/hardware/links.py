"""Seconds of collectives between devices: rings over the links of a box and the adapters between boxes.

A ring brings every byte into a box once, spread over all of its adapters, and passes it from device to device over
the links inside; the slower of the two is its rate (nccl-tests, doc/PERFORMANCE.md). Each message waits beside that
for its hops. tests/hardware/test_links.py compares the rates with published ones.
"""

import math
from dataclasses import dataclass

from hf_memopt.hardware.catalog import DEVICES_PER_HOST, Hardware, box_of
from hf_memopt.hardware.measured import constant


@dataclass(frozen=True)
class Links:
    """The links between a job's devices, in as few boxes as hold them."""

    device: Hardware
    ranks: int

    def seconds(self, size: float, messages: float = 1, in_box: bool = False) -> float:
        """Seconds until every rank has all shares of so many bytes; reducing them to shares takes as long.

        Args:
            messages: that the bytes are sent in.
            in_box: each box has all shares, and no other takes part.
        """
        ranks = min(self.ranks, DEVICES_PER_HOST) if in_box else self.ranks
        if ranks == 1:
            return 0.0
        # A message waits beside that, whatever its size: a hop after the other.
        boxes = math.ceil(ranks / DEVICES_PER_HOST)
        inside, between = constant("hop_seconds", self.device).value, constant("box_hop_seconds", self.device).value
        hops = (ranks - boxes) * inside + (boxes - 1) * between
        return size * (ranks - 1) / ranks / self.rate(ranks) + messages * hops

    def rate(self, ranks: int) -> float:
        """Bytes/s through each link of a ring (the bus bandwidth of nccl-tests)."""
        box, inside = box_of(self.device), self._inside(min(ranks, DEVICES_PER_HOST))
        if ranks <= DEVICES_PER_HOST:
            return inside
        return min(inside, box.adapters * box.adapter * constant("adapter_efficiency", self.device).value)

    def _inside(self, ranks: int) -> float:
        """Bytes/s from a device to the next in its box."""
        device, box = self.device, box_of(self.device)
        if box.switched:
            return (device.peer_link or 0) * constant("link_efficiency", device).value
        if box.meshed:  # a link of its own to each other device
            share = (ranks - 1) / (DEVICES_PER_HOST - 1)
            return (device.peer_link or 0) * share * constant("mesh_efficiency", device).value
        host = device.host_link or constant("unknown_host_link", device).value
        if ranks == 2 and (device.peer_link or 0) > host:  # a bridge joins two cards
            return device.peer_link * constant("link_efficiency", device).value
        return host * constant("pcie_ring_efficiency", device).value
