"""Saves and restores all random generators that a training step may draw from."""

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RandomState:
    """States of the generators of Python, numpy and torch (the CPU's and that of this process's device).

    Attributes:
        index: of the device. torch's current device is set per thread: another thread would restore device 0.
    """

    python: Any
    numpy: Any
    torch: Any
    device: Any
    index: int | None

    @classmethod
    def now(cls) -> "RandomState":
        import numpy
        import torch

        module = _device_module()
        device = index = None
        if module is not None:
            index = module.current_device() if hasattr(module, "current_device") else None
            device = module.get_rng_state() if index is None else module.get_rng_state(index)
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device, index)

    def restore(self) -> None:
        import numpy
        import torch

        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.device is not None:
            _device_module().set_rng_state(self.device, *([] if self.index is None else [self.index]))


def _device_module():
    """torch.cuda, torch.xpu or torch.mps; None on a CPU, or before CUDA is initialized."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda
    if torch.xpu.is_available():
        return torch.xpu
    return torch.mps if torch.backends.mps.is_available() else None
