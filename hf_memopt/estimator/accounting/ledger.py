"""Follow every tensor storage of a job: which are alive when, and of which kind.

On real CPU tensors the ledger's peak equals the profiler's allocator events to the byte. So a difference on fake
tensors comes from a fake kernel that allocates otherwise than the real one; accounting.kernels replaces those.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from hf_memopt.estimator.accounting import kernels, known_values
from hf_memopt.estimator.accounting.work import Kernel, Work

KINDS = ("parameters", "gradients", "optimizer_states", "activations", "logits", "workspace", "communication", "other")
HOST = "host"  # a kind beside KINDS: what an engine keeps in host memory, which does not count on the device
BLOCK = 512  # bytes; the CUDA caching allocator rounds every request up (c10/cuda/CUDACachingAllocator.cpp)
STACK = 10_000  # layer numbers of a second stack (a decoder beside an encoder) begin here


@dataclass
class Peak:
    """The most that was alive within one segment of the job.

    Attributes:
        total: bytes on the device.
        by_kind: kind -> bytes, which sum to the total.
        host: the most bytes that an engine kept in host memory, not necessarily at the same time.
    """

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    host: int = 0


class Event(NamedTuple):
    """An allocation or a free.

    Attributes:
        allocation: the number of the allocation.
        size: bytes; 0 for a free.
        visit: how many segments had begun; events with the same number belong to one visit of a segment.
        layer: number of the layer that the job was in; None outside the layers.
    """

    allocation: int
    size: int
    visit: int
    layer: int | None


@dataclass(frozen=True)
class TraceResult:
    """What a ledger recorded; unlike the ledger it can be pickled.

    Attributes:
        peaks, events, segments, layers, unquantized_experts, kept_logits: see Ledger.
        kernels: what the steps ran, where that was counted.
    """

    peaks: dict[str, Peak]
    events: list[Event]
    segments: list[str]
    layers: dict[int, int]
    unquantized_experts: bool
    kept_logits: int
    kernels: Counter[Kernel]


class Ledger(TorchDispatchMode):
    """A dispatch mode that counts live storages.

    Attributes:
        phase: load, forward, backward, optimizer, eval or between; the head of every segment's name.
        step: optimizer steps begun.
        peaks: segment -> Peak. Of equal peaks the later one counts: by then every tensor's kind is known.
        events: all allocations and frees on the device, in order.
        segments: the segment's name of each visit.
        layers: allocation -> number of the layer whose weight, gradient or optimizer state it holds.
        vocabulary: (vocabulary size, hidden size), by which logits are recognised.
        paused: new storages are not counted.
        unquantized_experts: the model is quantized, except for its experts.
        kept_logits: bytes of one evaluation batch's logits, where they wait for metrics.
        work: the kernels of the steps; None where they are not counted.

    Args:
        padded: batches hold padding.
        accelerator: count and compute as on an accelerator.
        fake: tensors are fake, so that reading one gives a plausible value; False follows real tensors.
        values: some fake tensors have known values, from which others follow.
    """

    def __init__(self, padded: bool = False, accelerator: bool = False, fake: bool = True, values: bool = False):
        super().__init__()
        self.phase = "load"
        self.step = 0
        self.peaks: dict[str, Peak] = {}
        self.events: list[Event] = []
        self.segments: list[str] = ["load"]
        self.layers: dict[int, int] = {}
        self.vocabulary = (0, 0)
        self.paused = False
        self.unquantized_experts = False
        self.kept_logits = 0
        self.work: Work | None = None
        self._segment = "load"
        self._layer: int | None = None
        self._visit = 0
        self._kind = "other"
        self._total = 0
        self._totals: defaultdict[str, int] = defaultdict(int)
        self._live: dict[int, tuple[int, str, int]] = {}  # storage -> bytes, kind, allocation
        self._allocations = 0
        self._conditions: set[int] = set()  # storages of booleans that say something about a whole batch
        self._padded = padded
        self._fake = fake
        self._values = values
        self._block = BLOCK if accelerator else 1
        self._python_kernels = kernels.find_python_kernels(accelerator) if fake else {}
        self._replaced = (kernels.ON_ACCELERATOR if accelerator else kernels.ON_CPU) if fake else {}

    def ignore_compile_internals(self) -> bool:
        """Whether torch.compile works under this mode as without one: measuring must not change real training. torch
        asks this of every mode (torch.utils._python_dispatch); fake tensors are never compiled."""
        return not self._fake

    def result(self) -> TraceResult:
        """What was recorded."""
        return TraceResult(
            self.peaks,
            self.events,
            self.segments,
            self.layers,
            self.unquantized_experts,
            self.kept_logits,
            self.work.kernels if self.work else Counter(),
        )

    def begin(self, phase: str, kind: str) -> None:
        """Begin a phase; new storages are of the given kind."""
        self.phase = phase
        self.enter(phase, kind)

    def enter(self, segment: str, kind: str | None = None, layer: int | None = None) -> None:
        """Begin a segment; its peak starts at what is alive now."""
        self._segment = segment
        self._layer = layer
        self._visit += 1
        self.segments.append(segment)
        self._kind = kind or self._kind
        self._note_peak()

    @contextmanager
    def booking(self, kind: str):
        """New storages are of the given kind in here."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def classify(self, tensor: torch.Tensor, kind: str) -> None:
        """Change the kind of a tensor's storage."""
        for part in _parts(tensor):
            key = part.untyped_storage()._cdata
            if key in self._live:
                size, old, allocation = self._live[key]
                self._live[key] = (size, kind, allocation)
                self._totals[old] -= size
                self._totals[kind] += size
                self._total += size * ((old == HOST) - (kind == HOST))

    def forget(self, tensor: torch.Tensor) -> None:
        """Stop counting a tensor's storage, whatever happens to it."""
        key = _storage(tensor)._cdata
        self._free(key)
        self._live[key] = (0, HOST, 0)

    def tag(self, tensor: torch.Tensor, layer: int | None) -> None:
        """Note the number of the layer whose weight, gradient or optimizer state a storage holds."""
        live = self._live.get(_storage(tensor)._cdata)
        if live and layer is not None:
            self.layers[live[2]] = layer

    def layer_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the layer that tag() noted for a storage."""
        live = self._live.get(_storage(tensor)._cdata)
        return self.layers.get(live[2]) if live else None

    def restart(self) -> None:
        """Discard what was recorded of load and start, and begin them with what is alive now."""
        alive = sorted((number, size) for size, kind, number in self._live.values() if kind != HOST)
        self.events = [Event(number, size, self._visit, None) for number, size in alive]
        for segment in ("load", "start"):
            self.peaks.pop(segment, None)
            self.enter(segment)

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted already, empty, or on the meta device."""
        for part in _parts(tensor):
            self._add_part(part)

    def _add_part(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or self.paused or storage.nbytes() == 0:
            return
        # A fake tensor's `device` is an operator that would be dispatched here again: two thirds of all calls.
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type == "meta":
            return
        kind = "logits" if self._is_logits(tensor) else self._kind
        self._allocate(key, storage.nbytes(), kind)
        weakref.finalize(storage, self._free, key)

    def resized(self, tensor: torch.Tensor) -> None:
        """Count a storage again whose size was changed in place."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            _, kind, _ = self._live[key]
            self._free(key)
            if storage.nbytes():
                self._allocate(key, storage.nbytes(), kind)
        else:
            self.add(tensor)

    def _allocate(self, key: int, size: int, kind: str) -> None:
        size = -(-size // self._block) * self._block
        self._allocations += 1
        self._live[key] = (size, kind, self._allocations)
        self._totals[kind] += size
        if kind != HOST:
            self._total += size
            self.events.append(Event(self._allocations, size, self._visit, self._layer))
        self._note_peak()

    def _is_logits(self, tensor: torch.Tensor) -> bool:
        vocabulary, hidden = self.vocabulary
        last = tuple(tensor.shape[-2:])
        return self._kind == "activations" and last[-1:] == (vocabulary,) and last != (hidden, vocabulary)

    def _free(self, key: int) -> None:
        live = self._live.pop(key, None)
        self._conditions.discard(key)
        if live is None:  # freed by resizing before
            return
        size, kind, allocation = live
        self._totals[kind] -= size
        if kind != HOST:
            self._total -= size
        self.events.append(Event(allocation, 0, self._visit, self._layer))

    def _note_peak(self) -> None:
        peak, host = self.peaks.get(self._segment), self._totals[HOST]
        if peak is None or self._total >= peak.total:
            by_kind = {kind: size for kind, size in self._totals.items() if size and kind != HOST}
            self.peaks[self._segment] = Peak(self._total, by_kind, max(host, peak.host if peak else 0))
        elif host > peak.host:
            peak.host = host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if types and any(map(_is_made_of_tensors, types)):
            return NotImplemented  # the subclass dispatches operators on its inner tensors, which come here again
        if self._fake and func in _SCALARS:
            known = known_values.known_value(args[0]) is not None
            return known_values.known_item(args[0]) if known else self._plausible_item(args[0])
        if func in self._python_kernels:
            with self:  # a mode is off in its own handler; the operators inside are to be counted
                return self._python_kernels[func](*args, **(kwargs or {}))
        before = self._allocations
        if self._values:
            out = known_values.run(func, args, kwargs or {}, self._replaced.get(func, func))
        elif self._fake and kernels.is_plain(func, args, kwargs):
            out = kernels.run_on_meta(func, args, kwargs or {})
        else:
            out = self._replaced.get(func, func)(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.add(out)
        else:
            tree_map_only(torch.Tensor, self.add, out)
        if self.work is not None and self.step and (self._allocations > before or func._schema.is_mutable):
            self.work.note(func, args, kwargs or {}, out, self.phase)
        if self._fake:
            if self._allocations > before and self.phase == "optimizer":
                self._inherit(args, out)
            if func in _CONDITIONS:
                self._conditions.add(out.untyped_storage()._cdata)
        return out

    def _inherit(self, args, out) -> None:
        """Tag what an optimizer computes from a layer's tensor with that layer; pair by pair for lists of tensors."""
        lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor)]
        if isinstance(out, list | tuple) and lists:
            for result, source in zip(out, lists[0], strict=False):
                self._inherit([source], result)
            return
        for arg in args:
            live = isinstance(arg, torch.Tensor) and self._live.get(arg.untyped_storage()._cdata)
            if live and live[2] in self.layers and isinstance(out, torch.Tensor):
                self.layers.setdefault(self._live[out.untyped_storage()._cdata][2], self.layers[live[2]])
                return

    def _plausible_item(self, tensor: torch.Tensor):
        """The value of a fake tensor of one element, as a healthy step would have it."""
        # Models ask whether a batch is unpadded (`all`, or a sum that equals a length), and `any` for overflow.
        if tensor.dtype is torch.bool:
            return tensor.untyped_storage()._cdata in self._conditions and not self._padded
        if tensor.dtype is torch.uint8:  # DeepSpeed's overflow flags
            return 0
        return 1.0 if tensor.dtype.is_floating_point else 1


def _is_made_of_tensors(kind: type) -> bool:
    """A DTensor, or torchao's quantized tensors (codes and scales): subclasses that dispatch on inner tensors."""
    return kind.__name__ == "DTensor" or kind.__module__.startswith("torchao.")


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's data on this device. A wrapper subclass has a storage, too, whose size is not
    backed by memory."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _storage(tensor: torch.Tensor):
    """The storage of a tensor's data on this device: a DTensor's local shard."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_SCALARS = (_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default)
_CONDITIONS = (_aten.all.default, _aten.all.dim, _aten.eq.Scalar, _aten.eq.Tensor)
