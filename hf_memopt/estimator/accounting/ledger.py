"""Follow every tensor storage of a job: what is alive when, and of which kind.

On real CPU tensors the ledger's peak equals the sum of the profiler's allocator events to the byte, so whatever
differs on fake tensors is a fake kernel that allocates otherwise than the real one.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from hf_memopt.estimator.accounting import known_values
from hf_memopt.estimator.accounting.work import Kernel, Work

KINDS = ("parameters", "gradients", "optimizer_states", "activations", "logits", "workspace", "communication", "other")
HOST = "host"  # booked, but not on the device: what an engine keeps in host memory
BLOCK = 512  # bytes; the CUDA caching allocator rounds every request up (c10/cuda/CUDACachingAllocator.cpp)
STACK = 10_000  # layer numbers of a second stack (a decoder beside an encoder) begin here


@dataclass
class Peak:
    """The most that was alive within one segment of the job.

    Attributes:
        total: bytes on the device.
        by_kind: kind -> bytes, which sum to the total.
        host: bytes that an engine kept in host memory, at most, whether then or at another time.
    """

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    host: int = 0


class Event(NamedTuple):
    """Memory taken or given back.

    Attributes:
        allocation: a number of its own.
        size: bytes; 0 when it is given back.
        visit: how many segments had begun, so that events of one stay are known to belong together.
        layer: of the model that the job was in; None outside its layers.
    """

    allocation: int
    size: int
    visit: int
    layer: int | None


@dataclass(frozen=True)
class Books:
    """What a ledger wrote, closed; it can travel between processes.

    Attributes:
        peaks, events, segment_of_visit, layers, unpacked_experts, kept_logits: the ledger's.
        kernels: what the steps ran, where that was counted.
    """

    peaks: dict[str, Peak]
    events: list[Event]
    segment_of_visit: list[str]
    layers: dict[int, int]
    unpacked_experts: bool
    kept_logits: int
    kernels: Counter[Kernel]


class Ledger(TorchDispatchMode):
    """A dispatch mode that keeps the books of live storages.

    Attributes:
        phase: load, forward, backward, optimizer, eval or between; the head of every segment's name.
        step: optimizer steps begun.
        peaks: segment -> Peak. Of equal peaks the later one counts: by then every tensor's kind is known.
        events: everything that was taken and given back on the device, in order.
        segment_of_visit: the segment of each stay.
        layers: allocation -> index of the layer whose weight, gradient or optimizer state it holds.
        vocabulary: (vocabulary size, hidden size), by which logits are recognised.
        paused: what is made now is not booked.
        unpacked_experts: the model is in 4 bits, but for its experts.
        kept_logits: bytes of one evaluation batch's logits, where they wait for metrics.
        work: the kernels of the steps; None where nobody asks.

    Args:
        padded: batches hold padding.
        accelerator: count and compute as on an accelerator.
        fake: tensors have no values, so that questions about them are answered; False follows real tensors.
        values: some fake tensors have known values, from which others follow.
    """

    def __init__(self, padded: bool = False, accelerator: bool = False, fake: bool = True, values: bool = False):
        super().__init__()
        self.phase = "load"
        self.step = 0
        self.peaks: dict[str, Peak] = {}
        self.events: list[Event] = []
        self.segment_of_visit: list[str] = ["load"]
        self.layers: dict[int, int] = {}
        self.vocabulary = (0, 0)
        self.paused = False
        self.unpacked_experts = False
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
        self._all: set[int] = set()
        self._padded = padded
        self._fake = fake
        self._values = values
        self._block = BLOCK if accelerator else 1
        self._opened = _written_in_torch(accelerator) if fake else {}
        self._replaced = (_ON_ACCELERATOR if accelerator else _ON_CPU) if fake else {}

    def ignore_compile_internals(self) -> bool:
        """Whether torch.compile works inside as it does without a mode: real training is not to be changed by being
        measured. torch asks this of every mode (torch.utils._python_dispatch); fake tensors are never compiled."""
        return not self._fake

    def closed(self) -> Books:
        """The books."""
        return Books(
            self.peaks,
            self.events,
            self.segment_of_visit,
            self.layers,
            self.unpacked_experts,
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
        self.segment_of_visit.append(segment)
        self._kind = kind or self._kind
        self._note_peak()

    @contextmanager
    def booking(self, kind: str):
        """What is made in here is of the given kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def classify(self, tensor: torch.Tensor, kind: str) -> None:
        """Book a tensor's storage under another kind."""
        for part in _parts(tensor):
            key = part.untyped_storage()._cdata
            if key in self._live:
                size, old, allocation = self._live[key]
                self._live[key] = (size, kind, allocation)
                self._totals[old] -= size
                self._totals[kind] += size
                self._total += size * ((old == HOST) - (kind == HOST))

    def forget(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage no more, whatever is done with it."""
        key = _storage(tensor)._cdata
        self._drop(key)
        self._live[key] = (0, HOST, 0)

    def tag(self, tensor: torch.Tensor, layer: int | None) -> None:
        """Say which layer's weight, gradient or optimizer state a storage holds."""
        booked = self._live.get(_storage(tensor)._cdata)
        if booked and layer is not None:
            self.layers[booked[2]] = layer

    def layer_of(self, tensor: torch.Tensor) -> int | None:
        """The layer that a storage was said to belong to."""
        booked = self._live.get(_storage(tensor)._cdata)
        return self.layers.get(booked[2]) if booked else None

    def restart(self) -> None:
        """Drop what was booked of load and start, and begin them with what is alive now."""
        alive = sorted((number, size) for size, kind, number in self._live.values() if kind != HOST)
        self.events = [Event(number, size, self._visit, None) for number, size in alive]
        for segment in ("load", "start"):
            self.peaks.pop(segment, None)
            self.enter(segment)

    def add(self, tensor: torch.Tensor) -> None:
        """Book a tensor's storage, unless it is booked already, empty, or a real tensor without bytes."""
        for part in _parts(tensor):
            self._add_part(part)

    def _add_part(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or self.paused or storage.nbytes() == 0:
            return
        # A fake tensor's `device` is an operator's answer, which comes through here again: two thirds of all calls.
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type == "meta":
            return
        kind = "logits" if self._is_logits(tensor) else self._kind
        self._book(key, storage.nbytes(), kind)
        weakref.finalize(storage, self._drop, key)

    def resized(self, tensor: torch.Tensor) -> None:
        """Follow a storage whose size was changed in place."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            _, kind, _ = self._live[key]
            self._drop(key)
            if storage.nbytes():
                self._book(key, storage.nbytes(), kind)
        else:
            self.add(tensor)

    def _book(self, key: int, size: int, kind: str) -> None:
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

    def _drop(self, key: int) -> None:
        booked = self._live.pop(key, None)
        self._all.discard(key)
        if booked is None:  # given back by resizing
            return
        size, kind, allocation = booked
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
            return NotImplemented  # its own operators come here again, on the tensors that it is made of
        if self._fake and func in _SCALARS:
            known = known_values.value_of(args[0]) is not None
            return known_values.item_of(args[0]) if known else self._plausible(args[0])
        if func in self._opened:
            with self:  # so that what it does inside is booked too
                return self._opened[func](*args, **(kwargs or {}))
        before = self._allocations
        if self._values:
            out = known_values.run(func, args, kwargs or {}, self._replaced.get(func, func))
        elif self._fake and _is_plain(func, args, kwargs):
            out = _shortcut(func, args, kwargs or {})
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
            if func in _ALL:
                self._all.add(out.untyped_storage()._cdata)
        return out

    def _inherit(self, args, out) -> None:
        """What an optimizer computes from a layer's tensors belongs to that layer, one by one for lists of tensors."""
        lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor)]
        if isinstance(out, list | tuple) and lists:
            for result, source in zip(out, lists[0], strict=False):
                self._inherit([source], result)
            return
        for arg in args:
            booked = isinstance(arg, torch.Tensor) and self._live.get(arg.untyped_storage()._cdata)
            if booked and booked[2] in self.layers and isinstance(out, torch.Tensor):
                self.layers.setdefault(self._live[out.untyped_storage()._cdata][2], self.layers[booked[2]])
                return

    def _plausible(self, tensor: torch.Tensor):
        """A value for a tensor that has none.

        Models ask whether a batch is of one piece (`all`, or a sum that equals a length), and `any` for trouble;
        DeepSpeed keeps flags of trouble in bytes.
        """
        if tensor.dtype is torch.bool:
            return tensor.untyped_storage()._cdata in self._all and not self._padded
        if tensor.dtype is torch.uint8:
            return 0
        return 1.0 if tensor.dtype.is_floating_point else 1


def _is_made_of_tensors(kind: type) -> bool:
    """A shard of a larger tensor, or torchao's quantized tensors (codes and scales)."""
    return kind.__name__ == "DTensor" or kind.__module__.startswith("torchao.")


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's bytes here. A subclass that is made of others has a storage too, of no bytes
    but with a size."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _storage(tensor: torch.Tensor):
    """What holds a tensor's bytes here: of a DTensor its own shard."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_SCALARS = (_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default)
_ALL = (_aten.all.default, _aten.all.dim, _aten.eq.Scalar, _aten.eq.Tensor)


# Most of a step's operators. Their results follow from shapes and types, by torch's own kernels for the meta device,
# which for these are not written in Python.
_PLAIN = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.detach.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.permute.default,
    _aten.mm.default,
    _aten._to_copy.default,
    _aten.clone.default,
}
_PLAIN_KEYWORDS = {"dtype", "memory_format"}


def _is_plain(func, args, kwargs) -> bool:
    """Whether an operator is one of those, or joins many pieces, as engines do for every rank and every weight."""
    if func in _PLAIN:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return not (kwargs and kwargs.keys() - _PLAIN_KEYWORDS) and all(map(_is_shape, tensors))
    return func is _aten.cat.default and len(args[0]) > 16 and all(map(_is_shape, args[0]))


def _is_shape(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cpu" and tensor.constant is None


def _shortcut(func, args, kwargs) -> FakeTensor:
    """What the fake operator gives, without the search for an earlier call like it, which takes several times as long
    as the call."""
    first = args[0] if isinstance(args[0], FakeTensor) else args[0][0]
    with in_kernel_invocation_manager(first.fake_mode):
        out = func(*args, **kwargs)
    return FakeTensor(first.fake_mode, out, first.fake_device)


def _attention(query, key, value, *args, **kwargs):
    """On CUDA, flash attention lays its output out as (batch, tokens, heads, size), so that the model need not copy
    it; on the CPU it keeps the query's layout."""
    batch, heads, tokens, _ = query.shape
    size = (batch, heads, tokens, value.shape[-1])
    out = torch.empty_permuted(size, (0, 2, 1, 3), dtype=query.dtype, device=query.device)
    wide = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    logsumexp = torch.empty((batch, tokens, heads), dtype=wide, device=query.device).transpose(1, 2)
    return out, logsumexp


_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _attention_backward_on_cuda(gradient, query, *args, **kwargs):
    """FlashAttention's backward sums the query's gradient in fp32 (dq_accum in flash_api.cpp) beside its result."""
    accumulator = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    result = _BACKWARD(gradient, query, *args, **kwargs)
    del accumulator
    return result


def _grouped_product(left, right, offs=None, bias=None, out_dtype=None):
    """The experts' products, one group of rows each. torch's fake kernel takes bf16 only, the CPU's any type."""
    if left.dim() == 2 and right.dim() == 2:  # a gradient of the experts' weights
        size = (offs.shape[0], left.shape[0], right.shape[1])
    else:
        size = (*(left.shape[:-1] if right.dim() == 3 else left.shape[1:-1]), right.shape[-1])
    return torch.empty(size, dtype=out_dtype or left.dtype, device=left.device)


# Kernels that allocate otherwise than the fake CPU ones. A collective's result, once it is there, is what was waited
# for.
_ON_CPU = {
    _aten._grouped_mm.default: _grouped_product,
    torch.ops._c10d_functional.wait_tensor.default: lambda awaited: awaited,
}
_ON_ACCELERATOR = {**_ON_CPU, _FORWARD: _attention, _BACKWARD: _attention_backward_on_cuda}


def _written_in_torch(accelerator: bool) -> dict:
    """bitsandbytes' operators that are Python over torch operators, whose temporaries its fake kernels do not show.

    Its 4-bit product unpacks the weight first, everywhere on the CPU and beyond a few hundred tokens on CUDA
    (_dequant_linear_fallback in bitsandbytes/backends/cuda/ops.py); its optimizers are Python on the CPU alone.
    """
    try:
        from bitsandbytes.backends.cpu import ops
        from bitsandbytes.backends.default import ops as everywhere
    except ImportError:
        return {}
    opened = {torch.ops.bitsandbytes.gemm_4bit.default: everywhere._gemm_4bit_default_impl}
    if accelerator:
        return opened
    return opened | {
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise.default: ops._optimizer_update_8bit_blockwise_cpu,
        torch.ops.bitsandbytes.optimizer_update_32bit.default: ops._optimizer_update_32bit_cpu,
    }
