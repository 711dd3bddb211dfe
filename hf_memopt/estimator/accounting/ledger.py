"""Follow every tensor storage of a job: which are alive when, and of which kind.

On real CPU tensors the ledger's peak equals the profiler's allocator events to the byte. So a difference on fake
tensors comes from a fake kernel that allocates otherwise than the real one; accounting.kernels replaces those.
"""

import functools
import itertools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from hf_memopt.estimator.accounting.work import Kernel, Work

KINDS = ("parameters", "gradients", "optimizer_states", "activations", "logits", "workspace", "communication", "other")
# Kinds beside KINDS, of memory outside torch's allocator on the device: what an engine keeps in host memory, and paged
# states of bitsandbytes (CUDA managed memory), which stay on the device as long as there is room for them.
HOST, PAGED = "host", "paged"
# What TRL's trainers that generate do before the forward pass of a step, one after the other.
GENERATION, LOG_PROBS, REWARDS = ROLLOUT_PHASES = ("generation", "log_probs", "rewards")
WEIGHT_SYNC = "weight_sync"  # the policy's weights are copied to vLLM
BLOCK = 512  # bytes; the CUDA caching allocator rounds every request up (c10/cuda/CUDACachingAllocator.cpp)
_BEFORE = ("load", "start")  # segments before the first step
STACK = 10_000  # layer numbers of a second stack (a decoder beside an encoder) begin here


@dataclass
class Peak:
    """The most that was alive within one segment of the job.

    Attributes:
        total: bytes on the device.
        by_kind: kind -> bytes, which sum to the total.
        host: the most bytes that an engine kept in host memory, not necessarily at the same time.
        paged: the most bytes of paged optimizer states.
    """

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    host: int = 0
    paged: int = 0

    def grow(self, kind: str, size: int) -> None:
        """Add to one kind and to the total."""
        self.total += size
        self.by_kind[kind] = self.by_kind.get(kind, 0) + size


class Moment(NamedTuple):
    """The place of a peak in the job, named by what does not depend on the number of layers.

    Attributes:
        segment: its name.
        run: how many phases had begun: which of the forward passes, of the optimizer's steps, and so on.
        layer: number of the layer; None outside the layers.
    """

    segment: str
    run: int
    layer: int | None


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
    """A ledger's records; unlike the ledger they can be pickled.

    Attributes:
        moments, events, segments, layers, unquantized_experts, kept_logits: see Ledger.
        kernels: what the steps ran, where that was counted.
        steps: optimizer steps that were traced.
        attention: the model's `attn_implementation`, its own choice where none was asked for.
    """

    moments: dict[Moment, Peak]
    events: list[Event]
    segments: list[str]
    layers: dict[int, int]
    unquantized_experts: bool
    kept_logits: int
    kernels: Counter[Kernel]
    steps: int = 1
    attention: str = ""

    @property
    def peaks(self) -> dict[str, Peak]:
        """Segment -> its highest Peak."""
        return highest(((moment.segment, peak) for moment, peak in self.moments.items()))


class Ledger(TorchDispatchMode):
    """A dispatch mode that counts live storages.

    Attributes:
        phase: load, forward, backward, optimizer, eval, between, or one of ROLLOUT_PHASES; the head of every segment's
            name.
        step: optimizer steps begun.
        moments: Moment -> Peak. Of equal peaks the later one counts: by then every tensor's kind is known.
        events: all allocations and frees on the device, in order.
        segments: the segment's name of each visit.
        layers: allocation -> number of the layer whose weight, gradient or optimizer state it holds.
        vocabulary: (vocabulary size, hidden size), by which logits are recognised.
        paused: new storages are not counted.
        without_gradient: ids of the trained weights that backward has not reached yet.
        unquantized_experts: the model is quantized, except for its experts.
        kept_logits: bytes of one evaluation batch's logits, where they wait for metrics.
        attention: see TraceResult.
        work: the kernels of the steps; None where they are not counted.

    Args:
        block: bytes; sizes are rounded up to multiples of it.
    """

    def __init__(self, block: int = 1):
        super().__init__()
        self.phase = "load"
        self.step = 0
        self.moments: dict[Moment, Peak] = {}
        self.events: list[Event] = []
        self.segments: list[str] = ["load"]
        self.layers: dict[int, int] = {}
        self.vocabulary = (0, 0)
        self.paused = False
        self.without_gradient: set[int] = set()
        self.unquantized_experts = False
        self.kept_logits = 0
        self.attention = ""
        self.work: Work | None = None
        self._moment = Moment("load", 0, None)
        self._runs = 0
        self._visit = 0
        self._kind = "other"
        self._total = 0
        self._totals: defaultdict[str, int] = defaultdict(int)
        self._live: dict[int, tuple[int, str, int]] = {}  # storage -> bytes, kind, allocation
        self._watched: dict[int, weakref.ref] = {}
        self._allocations = 0
        self._block = block

    def ignore_compile_internals(self) -> bool:
        """That torch.compile works under this mode as without one: measuring must not change real training. torch
        asks this of every mode (torch.utils._python_dispatch)."""
        return True

    def result(self) -> TraceResult:
        """Return the records until now: what garbage collection frees later is the trace's own end."""
        return TraceResult(
            self.moments,
            list(self.events),
            self.segments,
            self.layers,
            self.unquantized_experts,
            self.kept_logits,
            self.work.kernels if self.work else Counter(),
            self.step,
            self.attention,
        )

    @property
    def peaks(self) -> dict[str, Peak]:
        """Segment -> its highest Peak until now."""
        return highest(((moment.segment, peak) for moment, peak in self.moments.items()))

    def passed_layers(self) -> bool:
        """True if the phase that runs has been in a layer."""
        latest = itertools.takewhile(lambda segment: segment != self.phase, reversed(self.segments))
        return any("layer" in segment for segment in latest)

    def begin(self, phase: str, kind: str) -> None:
        """Begin a phase; new storages are of the given kind."""
        self.phase = phase
        self._runs += 1
        self.enter(phase, kind)

    def enter(self, segment: str, kind: str | None = None, layer: int | None = None) -> None:
        """Begin a segment; its peak starts at what is alive now."""
        self._moment = Moment(segment, self._runs, layer)
        self._visit += 1
        self.segments.append(segment)
        self._kind = kind or self._kind
        self._note_peak()

    @contextmanager
    def counting_as(self, kind: str):
        """New storages are of the given kind in here."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def classify(self, tensor: torch.Tensor, kind: str) -> None:
        """Change the kind of a tensor's storage; paged states stay paged."""
        for part in _parts(tensor):
            key = part.untyped_storage()._cdata
            if key in self._live:
                size, old, allocation = self._live[key]
                if old == PAGED:
                    continue
                self._live[key] = (size, kind, allocation)
                self._totals[old] -= size
                self._totals[kind] += size
                self._total += size * ((old == HOST) - (kind == HOST))
                if (old == HOST) != (kind == HOST):
                    event = Event(allocation, size if old == HOST else 0, self._visit, self._moment.layer)
                    self.events.append(event)

    def pin(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as pinned host memory, of which torch takes powers of two (2.13,
        ATen/core/CachingHostAllocator.h)."""
        self.classify(tensor, HOST)
        key = _storage(tensor)._cdata
        if key in self._live:
            size, kind, allocation = self._live[key]
            rounded = 1 << (size - 1).bit_length()
            self._live[key] = (rounded, kind, allocation)
            self._totals[HOST] += rounded - size

    def on_host(self, tensor: torch.Tensor) -> bool:
        """True if a tensor's storage is counted as host memory."""
        return self._live.get(_storage(tensor)._cdata, (0, None, 0))[1] == HOST

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

    def find_layer(self, tensor: torch.Tensor) -> int | None:
        """The number of the layer that tag() noted for a storage."""
        live = self._live.get(_storage(tensor)._cdata)
        return self.layers.get(live[2]) if live else None

    def restart(self) -> None:
        """Discard what was recorded of load and start, and begin them with what is alive now."""
        alive = sorted((number, size) for size, kind, number in self._live.values() if _counts(kind))
        self.events = [Event(number, size, self._visit, None) for number, size in alive]
        self.moments = {moment: peak for moment, peak in self.moments.items() if moment.segment not in _BEFORE}
        for segment in _BEFORE:
            self.enter(segment)

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted already, empty, or on the meta device."""
        if type(tensor) is FakeTensor:
            self._add_part(tensor)
            return
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
        self._allocate(key, storage.nbytes(), "logits" if self._is_logits(tensor) else self._kind)
        self._watched[key] = weakref.ref(storage, lambda _: self._free(key))  # finalize() takes several times as long

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
        if _counts(kind):
            self._total += size
            self.events.append(Event(self._allocations, size, self._visit, self._moment.layer))
        self._note_peak()

    def _is_logits(self, tensor: torch.Tensor) -> bool:
        vocabulary, hidden = self.vocabulary
        last = tuple(tensor.shape[-2:])
        return self._kind == "activations" and last[-1:] == (vocabulary,) and last != (hidden, vocabulary)

    def _free(self, key: int) -> None:
        live = self._live.pop(key, None)
        if live is None:  # freed by resizing before
            return
        size, kind, allocation = live
        self._totals[kind] -= size
        if _counts(kind):
            self._total -= size
        self.events.append(Event(allocation, 0, self._visit, self._moment.layer))

    def _note_peak(self) -> None:
        peak, host, paged = self.moments.get(self._moment), self._totals[HOST], self._totals[PAGED]
        host, paged = (max(host, peak.host), max(paged, peak.paged)) if peak else (host, paged)
        if peak is None or self._total >= peak.total:
            by_kind = {kind: size for kind, size in self._totals.items() if size and _counts(kind)}
            self.moments[self._moment] = Peak(self._total, by_kind, host, paged)
        else:
            peak.host, peak.paged = host, paged

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if made_of_tensors(types):
            return NotImplemented
        in_place = is_in_place(func, args)
        out = func(*args, **(kwargs or {}))
        if in_place:  # without this mode there would be no new tensor
            self._free(args[0].untyped_storage()._cdata)
        self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func, args, kwargs, out, shapes: tuple | None = None) -> None:
        """Count what an operator allocated, and its work.

        Args:
            shapes: as for Work.note().
        """
        before = self._allocations
        if isinstance(out, torch.Tensor):
            self.add(out)
        else:
            tree_map_only(torch.Tensor, self.add, out)
        if self.work is not None and self.step and (self._allocations > before or func._schema.is_mutable):
            self.work.note(func, args, kwargs, out, self.phase, shapes)


def highest(peaks: Iterable[tuple[Hashable, Peak]]) -> dict[Any, Peak]:
    """The highest Peak of each name, of equal ones the last; host and paged bytes are each the most of any."""
    result: dict[Any, Peak] = {}
    for name, peak in peaks:
        before = result.get(name)
        if before is not None:
            top = peak if peak.total >= before.total else before
            peak = Peak(top.total, top.by_kind, max(before.host, peak.host), max(before.paged, peak.paged))
        result[name] = peak
    return result


def _counts(kind: str) -> bool:
    """True if a kind counts on the device."""
    return kind not in (HOST, PAGED)


@functools.cache
def made_of_tensors(types: tuple[type, ...]) -> bool:
    """True if there are DTensors, or torchao's quantized tensors (codes and scales): subclasses that dispatch on
    their inner tensors, which then come to the ledger again."""
    return any(kind.__name__ == "DTensor" or kind.__module__.startswith("torchao.") for kind in types)


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


def is_in_place(func, args) -> bool:
    """True if autograd's engine would run an operator in place if no dispatch mode looked on."""
    return (func is _ADD and _adds_in_place(args)) or (func in _OF_BACKWARD and _called_by_autograd())


def _adds_in_place(args) -> bool:
    """True if autograd adds a second gradient of a tensor to the first one in place.

    Its engine does so where nothing else holds the first (accumulate() of torch 2.13, autograd/input_buffer.cpp), but
    never under a dispatch mode. A loop over the tokens, as in Mamba's scan, would seem to need one tensor more.
    """
    if not _called_by_autograd():
        return False
    first, second = args
    if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    storage = first.untyped_storage()
    dense = storage.nbytes() == first.numel() * first.element_size()
    return dense and first._use_count() <= _USES and torch._C._storage_Use_Count(storage._cdata) <= _STORAGE_USES


def _called_by_autograd() -> bool:
    """True if autograd's engine itself, no function in Python, called the operator that is being dispatched."""
    if torch.is_grad_enabled():
        return False
    caller = sys._getframe(1)
    while caller.f_code.co_name in _HANDLERS:
        caller = caller.f_back
    return caller.f_code.co_name == "_engine_run_backward"


# This module's functions, and torch's around a mode's handler, which keep Dynamo out.
_HANDLERS = ("_adds_in_place", "is_in_place", "__torch_dispatch__", "_fn", "inner")
# Of a gradient that only the engine holds, while a dispatch mode has it as an argument, and of its storage.
_USES, _STORAGE_USES = 4, 2
_aten = torch.ops.aten
_ADD = _aten.add.Tensor
# What backward scatters into zeros of its own: out of place only for subclasses of Tensor, such as fake ones, and
# under a mode (areAnyTensorSubclassLike in torch 2.13's autograd/FunctionsManual.cpp: index_backward and others).
_OF_BACKWARD = (
    *(_aten.scatter_add.default, _aten.scatter.src, _aten.index_put.default),
    *(_aten.index_add.default, _aten.masked_scatter.default),
)
