"""Every random generator that a training step may draw from, to come back to."""

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RandomState:
    """The states of Python's, numpy's and torch's generators (the CPU's and this process's device's)."""

    python: Any
    numpy: Any
    torch: Any
    device: Any

    @classmethod
    def now(cls) -> "RandomState":
        import numpy
        import torch

        module = _device_module()
        device = module.get_rng_state() if module is not None else None
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device)

    def restore(self) -> None:
        import numpy
        import torch

        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.device is not None:
            _device_module().set_rng_state(self.device)


def _device_module():
    """torch.cuda, torch.xpu or torch.mps where a device is in use."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda
    if torch.xpu.is_available():
        return torch.xpu
    return torch.mps if torch.backends.mps.is_available() else None
