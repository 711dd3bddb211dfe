"""Outputs of operators on fake tensors, remembered by the shapes of their inputs.

FakeTensorMode (torch 2.13) has such a cache, too, but a look-up there takes 0.2 ms, longer than most operators: it was
two thirds of a trace. What is not covered here (tensors with constants, other devices, sparse and complex ones,
operators of other libraries) runs under that mode as before.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import _C
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from hf_memopt.estimator.private_names import Part

_USED = Part.EVERY_JOB.relies_on(
    "torch._C:_DisableTorchDispatch",
    "torch._C:_PreserveDispatchKeyGuard",
    "torch._C:_get_dispatch_mode",
    "torch._C:_set_meta_in_tls_dispatch_include",
    why="accounting.fake_outputs makes fake tensors as FakeTensorMode does, without its slow cache and checks",
    until="a look-up in FakeTensorMode's cache takes no longer than the operator",
)
_aten = torch.ops.aten
_CPU = torch.device("cpu")
# Views, whose outputs share their input's storage: torch's kernels for the meta device make them, written in C++.
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten.view.dtype,
    _aten._unsafe_view.default,
}
# Collectives write into their first argument, one tensor or a list, and return it with a handle to wait on.
_COLLECTIVES = (
    {
        torch.ops.c10d._allgather_base_.default,
        torch.ops.c10d._reduce_scatter_base_.default,
        torch.ops.c10d.broadcast_.default,
    }
    if torch.distributed.is_available()
    else set()
)
_NAMESPACES = ("aten", "prims", "bitsandbytes", "fsdp")
_TAGS = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_MOST = 100_000  # remembered calls; a trace has about a thousand different ones

_remembered: dict[tuple, "_Outputs | None"] = {}


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outputs of a call.

    Attributes:
        fresh: shape, strides and dtype of each new tensor; None for None.
        container: list or tuple where there are several; None of a single output.
        changed: number of the argument that was changed in place and returned; None where outputs are new.
    """

    fresh: tuple[tuple | None, ...] = ()
    container: type | None = None
    changed: int | None = None


class Shapes:
    """A call's arguments, as far as the shapes of tensors say everything that its output depends on.

    Attributes:
        key: None where they do not.
        tensors: number of fake tensors.
        known: one of them has a known value (accounting.known_values).
    """

    __slots__ = ("key", "known", "tensors")

    def __init__(self, function, args, kwargs):
        self.tensors, self.known = 0, False
        parts = [function, torch.get_default_dtype()]
        complete = True
        for arg in args:
            complete = complete and self._add(parts, arg)
        for name, arg in kwargs.items():
            parts.append(name)
            complete = complete and self._add(parts, arg)
        self.key = tuple(parts) if complete else None

    def _add(self, parts: list, arg: Any) -> bool:
        kind = type(arg)
        if kind is FakeTensor:
            state, dtype = arg.__dict__, arg.dtype
            if state["constant"] is not None or state["_fake_device"] != _CPU or arg.layout is not torch.strided:
                return False
            self.tensors += 1
            self.known = self.known or "known_value" in state
            parts += (dtype, arg.shape, arg.stride())
            return dtype not in _COMPLEX
        if kind in _CONSTANTS:
            parts += (kind, arg)  # the kind, because 1 == 1.0 == True
            return True
        if kind is list or kind is tuple:
            parts.append(len(arg))
            return all(self._add(parts, each) for each in arg)
        return False


class FakeOutputs:
    """Makes the fake tensors that calls return."""

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self._attributes: dict[str, Any] = {}
        self._handles: dict[Any, Any] = {}

    def _view(self, func, args, kwargs):
        mode = args[0].fake_mode
        with _C._DisableTorchDispatch(), _C._PreserveDispatchKeyGuard():
            # in_kernel_invocation_manager() without contextlib, which takes longer than the kernel.
            mode.in_kernel_invocation = True
            _C._set_meta_in_tls_dispatch_include(True)
            try:
                out = func(*args, **kwargs)
            finally:
                mode.in_kernel_invocation = False
        return [self._fake(mode, each) for each in out] if isinstance(out, list | tuple) else self._fake(mode, out)

    def call(self, function, args, kwargs, key: tuple | None):
        """Return what FakeTensorMode returns.

        Args:
            key: of Shapes.
        """
        mode = _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE)
        if function in _COLLECTIVES and mode is not None:
            return self._collected(function, args, kwargs)
        if key is None or mode is None:
            return function(*args, **kwargs)
        if function in _VIEWS:
            return self._view(function, args, kwargs)
        if outputs := _remembered.get(key):
            return self._repeated(mode, outputs, args)
        out = function(*args, **kwargs)
        if key not in _remembered:
            if len(_remembered) >= _MOST:
                _remembered.clear()
            _remembered[key] = _describe(function, args, kwargs, out)
        return out

    def _collected(self, function, args, kwargs):
        """Run a collective. The handle of torch's fake process group is always done, so one serves all calls:
        to ask FakeTensorMode each time was a quarter of a trace with DeepSpeed."""
        if function not in self._handles:
            _, self._handles[function] = out = function(*args, **kwargs)
            return out
        written = args[0]
        return (list(written) if isinstance(written, list) else written), self._handles[function]

    def _repeated(self, mode: FakeTensorMode, outputs: _Outputs, args):
        if outputs.changed is not None:
            return args[outputs.changed]
        fresh = []
        for each in outputs.fresh:
            if each is not None:
                with _C._DisableTorchDispatch():
                    tensor = torch.empty_strided(each[0], each[1], dtype=each[2], device="meta")
                each = self._fake(mode, tensor)
            fresh.append(each)
        return fresh[0] if outputs.container is None else outputs.container(fresh)

    def _fake(self, mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
        """FakeTensor(mode, tensor, cpu), without checks, which take longer than all the rest."""
        if self._mode is not mode:
            self._mode, self._attributes = mode, dict(vars(FakeTensor(mode, tensor, _CPU)))
        fake = torch.Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        fake.__dict__.update(self._attributes)
        return fake


def _describe(function, args, kwargs, out) -> _Outputs | None:
    """Describe a call to remember; None where its output cannot be made from shapes."""
    several = isinstance(out, list | tuple)
    if isinstance(function, torch._ops.OpOverload):  # else one of accounting.kernels, which change nothing
        writes_out = function._overloadname.endswith("out")
        if function.namespace not in _NAMESPACES or writes_out or _TAGS & set(function.tags):
            return None
        if function._schema.is_mutable:
            changed = [place for place, arg in enumerate(args) if arg is out]
            if out is None:
                return _Outputs(fresh=(None,))
            return _Outputs(changed=changed[0]) if changed else None
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage()._cdata for tensor in inputs]
    fresh = []
    for each in out if several else [out]:
        if each is not None:
            if not _is_plain(each) or each.untyped_storage()._cdata in storages:
                return None
            storages.append(each.untyped_storage()._cdata)
            each = (each.shape, each.stride(), each.dtype)
        fresh.append(each)
    return _Outputs(tuple(fresh), type(out) if several else None)


def _is_plain(out: Any) -> bool:
    """True if empty_strided() makes such a tensor."""
    if type(out) is not FakeTensor or out.constant is not None or out.fake_device != _CPU:
        return False
    if out.layout is not torch.strided or out.dtype in _COMPLEX or out.storage_offset():
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
    return out.untyped_storage().nbytes() == (extent * out.element_size() if out.numel() else 0)
