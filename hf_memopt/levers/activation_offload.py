"""Activations in host memory between forward and backward, moved beside the computation.

A tensor that autograd saves is copied into pinned host memory on a stream of its own; its device memory is given back
two tensors later, when the copy is long done. In backward the next tensors are on their way back while one is used.
Host buffers are kept and used again. Together with activation checkpointing it is the layers' inputs that move; with
activation compression it is their 8-bit form.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.levers.activation_compression import Compressor
from hf_memopt.levers.saved_tensors import is_dense, place, save_through, storages_of

logger = logging.getLogger(__name__)

_SMALLEST = 1 << 20  # bytes; what is smaller stays: a copy takes longer to start than to run
_ON_THE_WAY = 2  # tensors whose copies may be under way


def offload_activations(model: torch.nn.Module, compressed: bool = False) -> None:
    """Keep a model's saved tensors in host memory while it trains.

    Args:
        compressed: in 8 bits.
    """
    save_through(model, Offloader(Compressor() if compressed else None))


class Streams:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def buffer(self, size: int) -> torch.Tensor:
        """So many bytes of pinned host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, destination: torch.Tensor, source: torch.Tensor):
        """Start a copy after everything that is queued for computing; returns an event."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        if destination.device.type != "cpu":
            destination.record_stream(self._stream)  # dropped unused, it may still be written
        return self._stream.record_event()

    def wait(self, event) -> None:
        """Let what is queued from now on begin when a copy is done."""
        self._module.current_stream().wait_event(event)


class AtOnce:
    """Copies that are done when they are asked for, into memory that need not be pinned."""

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def wait(self, event) -> None:
        pass


class Moved:
    """A tensor whose elements are in host memory.

    Attributes:
        number: in the order in which tensors were moved.
        here: the elements on the device again, once they are asked for.
        fetched: the event of their coming.
    """

    def __init__(self, number: int, source: torch.Tensor, host: torch.Tensor) -> None:
        self.number, self.host, self.device = number, host, source.device
        self.storage = StorageWeakRef(source.untyped_storage())  # keeps another one from getting its number
        self.here: torch.Tensor | None = None
        self.fetched: Any = None


class Offloader:
    """A Keeper that moves what is large to host memory.

    Args:
        compressor: what it takes moves in its form.
        lanes_for: makes what copies, for a device; None where tensors are in host memory already.
    """

    def __init__(self, compressor: Compressor | None = None, lanes_for: Callable | None = None) -> None:
        self.compressor, self.lanes_for = compressor, lanes_for or lanes_of
        self._lanes: Any = None
        self._asked = False
        self._weights: set[int] = set()
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._leaving: deque = deque()
        self._known: WeakValueDictionary[tuple, Moved] = WeakValueDictionary()
        self._by_number: WeakValueDictionary[int, Moved] = WeakValueDictionary()
        self._moved = 0

    def begin(self, model, inputs) -> None:
        self.end()
        self._weights = storages_of(model)
        if self.compressor is not None:
            self.compressor.begin(model, inputs)
        if not self._asked:
            self._lanes, self._asked = self.lanes_for(next(model.parameters()).device), True

    def end(self) -> None:
        """Wait for what is leaving, and drop it."""
        while self._leaving:
            self._drop_oldest()

    def pack(self, tensor):
        kept = self.compressor.pack(tensor) if self.compressor is not None else tensor
        if isinstance(kept, torch.Tensor):
            return self._moved_or_not(kept), kept.shape, kept.stride()
        compressed = kept[0]
        if not isinstance(compressed.codes, Moved):
            compressed.codes = self._moved_or_not(compressed.codes)
        return kept

    def unpack(self, kept):
        first, shape, stride = kept
        if isinstance(first, torch.Tensor):
            return first
        if isinstance(first, Moved):
            return self._back(first).as_strided(shape, stride)
        codes = first.codes
        here = self._back(codes).view(len(first.scales), -1) if isinstance(codes, Moved) else codes
        return first.restored(here).as_strided(shape, stride)

    def _moved_or_not(self, tensor: torch.Tensor):
        size = tensor.numel() * tensor.element_size()
        if self._lanes is None or size < _SMALLEST or not is_dense(tensor):
            return tensor
        if tensor.untyped_storage()._cdata in self._weights:
            return tensor
        key = place(tensor)
        moved = self._known.get(key)
        if moved is None:
            moved = self._known[key] = self._move(tensor, size)
        return moved

    def _move(self, tensor: torch.Tensor, size: int) -> Moved:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        room = _room(size)
        buffer = self._free[room].pop() if self._free[room] else self._lanes.buffer(room)
        host = buffer[:size].view(tensor.dtype)
        moved = Moved(self._moved, tensor, host)
        self._by_number[self._moved] = moved
        self._moved += 1
        finalize(moved, self._free[room].append, buffer)
        self._leaving.append((tensor, self._lanes.copy(host, flat)))
        if len(self._leaving) > _ON_THE_WAY:
            self._drop_oldest()
        return moved

    def _drop_oldest(self) -> None:
        # Its memory is used again by what is queued after the copy.
        _, event = self._leaving.popleft()
        self._lanes.wait(event)

    def _back(self, moved: Moved) -> torch.Tensor:
        """The elements on the device; the ones that were moved before them follow."""
        self.end()
        for number in range(moved.number, moved.number - 1 - _ON_THE_WAY, -1):
            wanted = self._by_number.get(number)
            if wanted is not None and wanted.here is None:
                wanted.here = torch.empty(wanted.host.shape, dtype=wanted.host.dtype, device=wanted.device)
                wanted.fetched = self._lanes.copy(wanted.here, wanted.host)
        self._lanes.wait(moved.fetched)
        return moved.here


def _room(size: int) -> int:
    """Bytes of a buffer for so many: one of four sizes an octave, so that batches of all lengths share buffers."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def lanes_of(device: torch.device):
    """What copies between a device and host memory; None, with a message, where they are one."""
    if device.type in ("cpu", "mps"):
        logger.warning("activation_offload does nothing here: activations are in the host's memory already")
        return None
    return Streams(device)
