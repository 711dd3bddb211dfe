"""Optimizers whose code no trace can run: torchao's by formula where it is not installed, the others refused.

Sharded jobs are planned with torchao's 8-bit states, so these are counted everywhere. Handlers of transformers create
the stand-ins as they create the real ones: parameter groups, hooks, `optim_args`.
"""

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch

from hf_memopt.compatibility.rules import PACKAGES
from hf_memopt.compatibility.setup import check_package
from hf_memopt.errors import InputError
from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.tracing.fake_tensors import QUANTIZED_STEP_BYTES
from hf_memopt.packages import is_installed

_QUANTIZED_FROM = 4096  # elements of a weight whose states torchao quantizes
_FLOAT = torch.float32


class TorchAO8Bit(torch.optim.Optimizer):
    """Allocates as torchao 0.18 does and updates nothing: optim/adam.py, _new_buffer(); subclass_8bit.py."""

    bits, block, name = 8, 256, "OptimState8bit"

    def __init__(self, params, lr=1e-3, **settings):
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                local = getattr(weight, "_local_tensor", weight)
                block = group.get("block_size", self.block)
                quantizes = local.numel() >= _QUANTIZED_FROM and local.numel() % block == 0
                if weight not in self.state:
                    self.state[weight] = dict(enumerate(self._states(local, quantizes, block)))
                torch.empty(QUANTIZED_STEP_BYTES[self.name] * local.numel() * quantizes, dtype=torch.uint8)

    def _states(self, weight: torch.Tensor, quantizes: bool, block: int) -> Iterator[torch.Tensor]:
        yield torch.zeros((), dtype=_FLOAT)  # step
        for _ in range(2):
            if not quantizes:
                yield torch.zeros_like(weight)
                continue
            yield weight.new_zeros(weight.numel() * self.bits // 8, dtype=torch.uint8)
            yield weight.new_zeros(-(-weight.numel() // block), dtype=_FLOAT)  # a scale for every block
            yield weight.new_zeros(2**self.bits, dtype=_FLOAT)  # qmap


class TorchAO4Bit(TorchAO8Bit):
    """torchao/optim/subclass_4bit.py."""

    bits, block, name = 4, 128, "OptimState4bit"


_TORCHAO = Part.OPTIMIZERS.replaces(
    "transformers.trainer_optimizer:_OPTIMIZER_HANDLERS",
    "transformers.trainer_optimizer:is_torchao_available",
    why="creates torchao's optimizers where it is not installed: they are counted by formula",
    until="never: a trace needs no torchao",
)
# They call CUDA when they are made or step.
_CUDA_ONLY = {"adalomo", "galore_adamw_8bit", "galore_adamw_8bit_layerwise", "adamw_anyprecision"}
# On a device GrokAdamW's states are in host memory, and Triton kernels step StableAdamW: not what a CPU trace sees.
_OTHER_ON_DEVICES = {"grokadamw", "stable_adamw"}


def check_traceable(optim: str, accelerator: bool) -> None:
    """Refuse an optimizer whose code cannot run in a trace.

    Args:
        accelerator: the job is meant for one.

    Raises:
        InputError: its package is missing, or calls CUDA.
    """
    package = PACKAGES.get(optim)
    if package is None or package == "torchao":
        return
    check_package(optim)
    if optim in _CUDA_ONLY or (accelerator and optim in _OTHER_ON_DEVICES):
        raise InputError(f"optim={optim} does on a card what no trace on a CPU shows: use optim=adamw_torch")


def by_formula(optim: str) -> bool:
    """True if torchao's optimizer is counted instead of being run."""
    return PACKAGES.get(optim) == "torchao" and not is_installed("torchao")


def stand_ins(optim: str) -> contextlib.AbstractContextManager:
    """transformers creates stand-ins in here, where an optimizer is counted by formula."""
    if not by_formula(optim):
        return contextlib.nullcontext()
    import transformers.trainer

    handlers = _TORCHAO.original("_OPTIMIZER_HANDLERS")

    def create(context):
        # transformers finds and imports torchao, with the classes of this file; its version decides where they are.
        module, version = ModuleType("torchao.optim"), importlib.metadata.version
        vars(module).update(AdamW8bit=TorchAO8Bit, AdamW4bit=TorchAO4Bit)
        modules = {"torchao": ModuleType("torchao"), "torchao.optim": module}
        with (
            mock.patch.dict(sys.modules, modules),
            mock.patch.object(
                importlib.metadata, "version", lambda name: "0.18.0" if name == "torchao" else version(name)
            ),
            _TORCHAO.replaced(is_torchao_available=lambda *_: True),
        ):
            return handlers[optim](context)

    return _TORCHAO.replaced([transformers.trainer], _OPTIMIZER_HANDLERS={**handlers, optim: create})
