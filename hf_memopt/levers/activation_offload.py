"""Offload activations to host memory between forward and backward, overlapping the copies with compute.

Each tensor that autograd saves is copied to pinned host memory on a separate stream. Its device memory is freed two
tensors later, when the copy has usually finished. Backward prefetches the next tensors while one is in use. Pinned
buffers are reused. With activation checkpointing the layers' inputs are offloaded; with activation compression, their
8-bit form.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.levers.activation_compression import Compressor
from hf_memopt.levers.saved_tensors import is_dense, location, save_through, weight_storages

logger = logging.getLogger(__name__)

_SMALLEST = 1 << 20  # bytes; launching a copy of less takes longer than the copy
IN_FLIGHT = 2  # tensors whose copies may be running


def offload_activations(model: torch.nn.Module, compressed: bool = False) -> None:
    """Offload a model's saved tensors to host memory while it trains.

    Args:
        compressed: quantize them to 8 bits first.
    """
    save_through(model, Offloader(Compressor() if compressed else None))


class Streams:
    """Copies on a stream of their own.

    Attributes:
        freed_unused: what is copied to may be freed before anything waits for the copy.
    """

    freed_unused = True

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def buffer(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of pinned host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, destination: torch.Tensor, source: torch.Tensor):
        """Start a copy, and return its event. It is queued behind the current stream's work, which may still free or
        fill what is copied."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        if self.freed_unused and destination.device.type != "cpu":
            destination.record_stream(self._stream)  # the copy may still write to it
        return self._stream.record_event()

    def wait(self, event) -> None:
        """Make the current stream wait for a copy."""
        self._module.current_stream().wait_event(event)


class AtOnce:
    """Synchronous copies to pageable memory."""

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def wait(self, event) -> None:
        pass


class Offloaded:
    """A tensor whose elements are in host memory.

    Attributes:
        number: position in the order of offloading.
        on_device: the elements on the device, once they are fetched or prefetched.
        fetched: the event of that copy.
    """

    def __init__(self, number: int, source: torch.Tensor, host: torch.Tensor) -> None:
        self.number, self.host, self.device = number, host, source.device
        # While it is referenced, no other storage gets its address.
        self.storage = StorageWeakRef(source.untyped_storage())
        self.on_device: torch.Tensor | None = None
        self.fetched: Any = None


class Offloader:
    """A Keeper that offloads large tensors to host memory.

    Args:
        compressor: compresses tensors before they are offloaded.
        lanes_for: device -> what copies between it and host memory, as make_lanes(); None offloads nothing.
    """

    def __init__(self, compressor: Compressor | None = None, lanes_for: Callable | None = None) -> None:
        self.compressor, self.lanes_for = compressor, lanes_for or make_lanes
        self._lanes: Any = None
        self._prepared = False
        self._weights: set[int] = set()
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._leaving: deque = deque()
        self._offloaded: WeakValueDictionary[tuple, Offloaded] = WeakValueDictionary()
        self._by_number: WeakValueDictionary[int, Offloaded] = WeakValueDictionary()
        self._moved = 0

    def begin(self, model, inputs) -> None:
        self.end()
        self._weights = weight_storages(model)
        if self.compressor is not None:
            self.compressor.begin(model, inputs)
        if not self._prepared:
            self._lanes, self._prepared = self.lanes_for(next(model.parameters()).device), True

    def end(self) -> None:
        """Wait for all running copies to the host, and free the tensors' device memory."""
        while self._leaving:
            self._drop_oldest()

    def pack(self, tensor):
        saved = self.compressor.pack(tensor) if self.compressor is not None else tensor
        if isinstance(saved, torch.Tensor):
            return self._offload(saved), saved.shape, saved.stride()
        compressed = saved[0]
        if not isinstance(compressed.codes, Offloaded):
            compressed.codes = self._offload(compressed.codes)
        return saved

    def unpack(self, saved):
        first, shape, stride = saved
        if isinstance(first, torch.Tensor):
            return first
        if isinstance(first, Offloaded):
            return self._fetch(first).as_strided(shape, stride)
        codes = first.codes
        codes = self._fetch(codes).view(len(first.scales), -1) if isinstance(codes, Offloaded) else codes
        return first.decompress(codes).as_strided(shape, stride)

    def _offload(self, tensor: torch.Tensor):
        size = tensor.numel() * tensor.element_size()
        small = self._lanes is None or size < _SMALLEST
        if small or not is_dense(tensor) or tensor.untyped_storage()._cdata in self._weights:
            return tensor
        key = location(tensor)
        moved = self._offloaded.get(key)
        if moved is None:
            moved = self._offloaded[key] = self._move(tensor, size)
        return moved

    def _move(self, tensor: torch.Tensor, size: int) -> Offloaded:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        room = _buffer_bytes(size)
        buffer = self._free[room].pop() if self._free[room] else self._lanes.buffer(room)
        host = buffer[:size].view(tensor.dtype)
        moved = Offloaded(self._moved, tensor, host)
        self._by_number[self._moved] = moved
        self._moved += 1
        finalize(moved, self._free[room].append, buffer)
        self._leaving.append((tensor, self._lanes.copy(host, flat)))
        if len(self._leaving) > IN_FLIGHT:
            self._drop_oldest()
        return moved

    def _drop_oldest(self) -> None:
        # Kernels that reuse its memory must be queued after the copy.
        _, event = self._leaving.popleft()
        self._lanes.wait(event)

    def _fetch(self, moved: Offloaded) -> torch.Tensor:
        """The elements on the device; prefetches the tensors that were offloaded before them."""
        self.end()
        for number in range(moved.number, moved.number - 1 - IN_FLIGHT, -1):
            prefetched = self._by_number.get(number)
            if prefetched is not None and prefetched.on_device is None:
                prefetched.on_device = torch.empty(
                    prefetched.host.shape, dtype=prefetched.host.dtype, device=prefetched.device
                )
                prefetched.fetched = self._lanes.copy(prefetched.on_device, prefetched.host)
        self._lanes.wait(moved.fetched)
        return moved.on_device


def _buffer_bytes(size: int) -> int:
    """Round up to one of four sizes per power of two, so that batches of different lengths share buffers."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def make_lanes(device: torch.device):
    """Make what copies between a device and host memory; None, with a warning, where they share their memory."""
    if device.type in ("cpu", "mps"):
        logger.warning("activation_offload has no effect here: activations are in host memory already")
        return None
    return Streams(device)
