"""Activations that go to the host in a trace: the buffers are counted as host memory, although all is on the CPU."""

import torch

from hf_memopt.estimator.accounting.ledger import HOST, Ledger
from hf_memopt.levers.weight_streaming import LanesAtOnce


def counted_lanes(ledger: Ledger) -> LanesAtOnce:
    """The copies for levers.activation_offload and levers.weight_streaming, counted."""

    class CountedLanes(LanesAtOnce):
        def buffer(self, size):
            with ledger.counting_as(HOST):
                return super().buffer(size)

        def resize(self, tensor, size):
            super().resize(tensor, size)
            with ledger.counting_as("parameters"):
                ledger.resized(tensor)

    return CountedLanes()


def save_on_host(ledger: Ledger) -> type:
    """torch's save_on_cpu, in which transformers checkpoints layers whose inputs are offloaded."""

    class SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            def pack(tensor: torch.Tensor) -> torch.Tensor:
                with ledger.counting_as(HOST):
                    return tensor.clone()

            super().__init__(pack, torch.clone)

    return SaveOnHost
