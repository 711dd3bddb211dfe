"""TRL's activation_offloading in a trace: its own hooks, with a stand-in for the device's streams and pinned memory.

From the source of trl 1.16 (`models/activation_offloading.py`); not measured on a GPU. Its copies are made at once, so
that what waits for one is what its own limits keep: five saved tensors forward, those of two operators backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from hf_memopt.engines import Engine
from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.ledger import HOST, Ledger
from hf_memopt.estimator.device_stand_in import Stream
from hf_memopt.estimator.private_names import Part
from hf_memopt.hardware import Hardware

FORWARD_STASH = 5  # saved tensors whose copies to the host may be on their way: max_fwd_stash_size
_HOOKS = Part.TRL.relies_on(
    "trl.models.activation_offloading:get_act_offloading_ctx_manager(model)",
    why="activation_offloading decides by them what stays on the device",
)


class _Copies(TorchFunctionMode):
    """On the stream of copies, tensors are made in pinned memory, and what moves to the device becomes another."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.empty, torch.empty_like):
            like = args[0] if func is torch.empty_like else None
            shape, dtype = (args[0], kwargs["dtype"]) if like is None else (like.shape, like.dtype)
            size = dtype.itemsize * torch.Size(shape).numel()
            with self.ledger.counting_as(HOST):
                room = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8)  # CachingHostAllocator rounds so
            return room[:size].view(dtype).view(shape)
        return args[0].clone() if func is torch.Tensor.to else func(*args, **(kwargs or {}))


@contextmanager
def counted_offloading(fields, trainer, ledger: Ledger) -> Iterator[None]:
    """A trainer of TRL whose activation_offloading, where its fields ask for it, counts host memory.

    Args:
        trainer: with the model that is traced; it gets the hooks.
    """
    if not fields.get("activation_offloading"):
        yield
        return
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    streams = SimpleNamespace(
        Stream=Stream, current_stream=Stream, stream=lambda _: _Copies(ledger), empty_cache=lambda: None
    )
    with (
        mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),  # fake ones are all 0
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        with (
            mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")),
            mock.patch.object(torch, "get_device_module", lambda device: streams),
        ):
            trainer.maybe_activation_offload_context = get_act_offloading_ctx_manager(model=trainer.model)
        yield


def check_offloading(fields, device: Hardware, engine: Engine) -> None:
    """Refuse activation_offloading where TRL has no streams, and where it would take gathered weights for activations:
    it knows weights by their storage, and every gather makes another.

    Raises:
        InputError: with what to set instead.
    """
    if not fields.get("activation_offloading"):
        return
    if not device.discrete_memory:
        raise InputError(
            f"activation_offloading=true: trl 1.16 needs an accelerator with streams and memory of its own, which "
            f"{device.label} has not: leave it out"
        )
    if engine.shards_weights:
        raise InputError(
            f"activation_offloading=true would store the weights that {engine.label} gathers: leave it out, or use "
            "ddp or zero2"
        )
