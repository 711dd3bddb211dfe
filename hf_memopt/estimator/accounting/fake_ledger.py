"""The ledger of a traced job: it follows fake tensors, answers what code asks of their values, and counts kernels."""

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_memopt.estimator.accounting import kernels, known_values
from hf_memopt.estimator.accounting.fake_outputs import FakeOutputs, Shapes
from hf_memopt.estimator.accounting.ledger import BLOCK, Ledger, is_in_place, made_of_tensors

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
# Marks for torch's profiler: FSDP2 makes hundreds, and FakeTensorMode takes as long for one as for a matmul.
_MARKS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_SCALARS = {_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default}
_CONDITIONS = {_aten.all.default, _aten.all.dim, _aten.eq.Scalar, _aten.eq.Tensor}


class FakeLedger(Ledger):
    """A ledger that runs operators on fake tensors.

    Args:
        padded: batches hold padding.
        accelerator: count and compute as on an accelerator.
    """

    def __init__(self, padded: bool = False, accelerator: bool = False):
        super().__init__(BLOCK if accelerator else 1)
        self._padded = padded
        self._accelerator = accelerator
        self._conditions: set[int] = set()  # allocations of booleans that say something about a whole batch
        self._python_kernels = kernels.find_python_kernels(accelerator)
        self._replaced = kernels.ON_ACCELERATOR if accelerator else kernels.ON_CPU
        self._outputs = FakeOutputs()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False leaves the handler as it is. torch wraps those of other modes, to keep Dynamo out, at 1 µs a call:
        nothing compiles on fake tensors."""
        return False

    def ignore_compile_internals(self) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if made_of_tensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func in _MARKS:
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if func in _SCALARS:
            has_value = known_values.known_value(args[0]) is not None
            return known_values.known_item(args[0]) if has_value else self._plausible_item(args[0])
        if func in self._python_kernels:
            with self:  # a mode is off in its own handler; the operators inside are to be counted
                return self._python_kernels[func](*args, **kwargs)
        if (wide := kernels.reduced_in(func, args, kwargs, self._accelerator)) is not None:
            with self:
                reduced = func(args[0].to(wide), *args[1:], **kwargs | {"dtype": wide})
                return reduced.to(kwargs.get("dtype") or args[0].dtype)
        if is_in_place(func, args):
            return args[0]
        before = self._allocations
        out, shapes = self._run(func, args, kwargs)
        self._count(func, args, kwargs, out, shapes)
        if self._allocations > before and self.phase == "optimizer":
            self._inherit(args, out)
        if func in _CONDITIONS and (live := self._live.get(out.untyped_storage()._cdata)):
            self._conditions.add(live[2])
        return out

    def _run(self, func, args, kwargs):
        """An operator's output, and the shapes that decide it; None where values do, too."""
        function = self._replaced.get(func, func)
        shapes = Shapes(function, args, kwargs)
        by_shapes = shapes.key is not None and shapes.tensors and not shapes.known
        if (not by_shapes or func in known_values.SHAPED_BY_VALUES) and known_values.concerns(func, args, kwargs):
            return known_values.run(func, args, kwargs, functools.partial(self._call, function)), None
        return self._outputs.call(function, args, kwargs, shapes.key), shapes.key

    def _call(self, function, *args, **kwargs):
        shapes = Shapes(function, args, kwargs)
        reads_values = shapes.known and not isinstance(function, torch._ops.OpOverload)  # one of accounting.kernels
        return self._outputs.call(function, args, kwargs, None if reads_values else shapes.key)

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
            live = self._live.get(tensor.untyped_storage()._cdata)
            return live is not None and live[2] in self._conditions and not self._padded
        if tensor.dtype is torch.uint8:  # DeepSpeed's overflow flags
            return 0
        return 1.0 if tensor.dtype.is_floating_point else 1
