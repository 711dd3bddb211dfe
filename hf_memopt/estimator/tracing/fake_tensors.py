"""A context in which models and trainers run on fake tensors: shapes without data.

While it lasts, replacements correct what libraries do differently with fake tensors, or would do on an accelerator.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.int8_kernels import matmul_on_cuda
from hf_memopt.estimator.accounting.known_values import (
    forget,
    known_value,
    set_value,
    tensor_from_values,
    tolist_from_values,
)
from hf_memopt.estimator.patches.accelerator_operators import (
    accelerator_operators,
    foreach_optimizers,
    named_cuda_autocast,
)
from hf_memopt.estimator.patches.fake_adapters import traceable_adapters
from hf_memopt.estimator.patches.flex_attention import counted_flex_attention
from hf_memopt.estimator.private_names import Part


class FakeMode(FakeTensorMode):
    """The fake tensor mode, of which copied tensors share one.

    A deep copy of a fake tensor copies its attributes, so torch 2.13 copies the mode with all that it remembers: among
    it the C++ references to storages of known values, which are then released twice, and the heap is corrupted.
    """

    def __deepcopy__(self, memo: dict) -> "FakeMode":
        return self


CAST = Part.EVERY_JOB.replaces(
    "torch.nn:Module.to(self)",
    why="moving a module swaps its parameters, which fake tensors refuse: only the cast is done, in place",
    until="Module.to works on fake tensors",
)
_EXPORT = Part.EVERY_JOB.replaces(
    "transformers.utils.import_utils:is_fake_tensor(x)",
    why="transformers takes a fake tensor for an export and then builds every attention mask in full",
    until="transformers asks torch.compiler.is_exporting() instead",
)
_TENSOR = Part.EVERY_JOB.replaces(
    "torch:tensor",
    why="reads the bytes of the tensors in a list; fake ones have none, but may have a known value",
    until="torch.tensor takes fake tensors with a constant",
)
_LIST = Part.EVERY_JOB.replaces(
    "torch._subclasses.fake_tensor:FakeTensor.tolist(self)",
    why="asks element by element; known values are read at once",
    until="never: torch knows nothing of known values",
)
_COPY = Part.EVERY_JOB.replaces(
    "torch._subclasses.fake_tensor:FakeTensor.__deepcopy__(self, memo)",
    why="torch 2.13 writes into the storage of a fake tensor's constant and corrupts the heap",
    until="deepcopy of FakeTensor(constant=…) works",
)
_COMPILE = Part.EVERY_JOB.replaces(
    "torch:compile(model)",
    why="nothing compiles on fake tensors; torchao's optimizer step is booked as its compiled form",
    until="never: a trace does not compile",
)


@contextmanager
def fake_world(backend: str, flex: bool = False, paging: Callable = nullcontext, fp8: bool = False) -> Iterator[None]:
    """Run on fake CPU tensors.

    Autograd on fake CUDA tensors aborts in torch builds without CUDA (it needs the device guard). An accelerator's job
    is therefore traced on the CPU, too; replacements here and in accounting.kernels do what torch does on CUDA.

    Args:
        backend: of the device that the job is meant for: cuda | rocm | mps | xpu | cpu.
        flex: levers use flex attention on its device.
        paging: makes a context in which allocations are paged optimizer states.
        fp8: weights are FP8.
    """
    accelerator = backend != "cpu"
    # At the first call in a `with torch.device(…)` torch caches its constructors: those must not be the replaced ones.
    with torch.device("cpu"):
        torch.empty(0)
    with (
        CAST.replaced(to=cast_in_place),
        _EXPORT.replaced(is_fake_tensor=lambda tensor: False),
        _TENSOR.replaced(tensor=tensor_from_values(torch.tensor)),
        _LIST.replaced(tolist=tolist_from_values(FakeTensor.tolist)),
        _COPY.replaced(__deepcopy__=_deepcopy),
        _COMPILE.replaced(compile=_uncompiled),
        foreach_optimizers() if accelerator else nullcontext(),
        _bitsandbytes(paging if accelerator else None),
        traceable_adapters(),
        matched_in_order(),
        accelerator_operators(backend) if accelerator else nullcontext(),
        named_cuda_autocast() if backend in ("cuda", "rocm") else nullcontext(),
        counted_flex_attention() if flex else nullcontext(),
        counted_fp8_kernels() if fp8 else nullcontext(),
        FakeMode(allow_non_fake_inputs=True),
    ):
        yield


def cast_in_place(module: torch.nn.Module, *args, **kwargs) -> torch.nn.Module:
    """Module.to that only casts: each parameter keeps its identity and gets new data."""
    dtype = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    if dtype is not None:
        for weight in (*module.parameters(), *module.buffers()):
            if weight.is_floating_point() and weight.dtype is not dtype:
                weight.data = weight.data.to(dtype)
    return module


def _deepcopy(tensor: FakeTensor, memo: dict):
    """A deep copy of a fake tensor. For a small one that keeps its value (`constant`, an optimizer's learning rate
    say), torch 2.13 would write a whole copy into the value's storage and corrupt the heap. A known value is a real
    tensor, whose storage would be copied as a fake one: the copy shares it."""
    if tensor.constant is None:
        value = known_value(tensor)
        forget(tensor)
        copied = torch.Tensor.__deepcopy__(tensor, memo)
        for each in (tensor, copied) if value is not None else ():
            set_value(each, value)
        return copied
    return memo.setdefault(id(tensor), tensor.detach().clone())


# Bytes for each element of the weight that torchao's compiled step takes beside its states, one weight at a time:
# what the profiler counts on a CPU with torch 2.13 and torchao 0.18, for fp32 and bf16 weights alike. No card was
# measured.
QUANTIZED_STEP_BYTES = {"OptimState8bit": 8, "OptimState4bit": 26}


def _uncompiled(function=None, **kwargs):
    """torch.compile that leaves a function as it is, except torchao's step: fake tensors are not compiled."""
    if function is None:
        return _uncompiled
    return _quantized_step if getattr(function, "__module__", "") == "torchao.optim.adam" else function


def _quantized_step(weight, gradient, step, mean, *args) -> None:
    """The allocations of torchao's compiled step; run eagerly it would take several times as much."""
    local = getattr(mean, "_local_tensor", mean)
    size = QUANTIZED_STEP_BYTES.get(type(local).__name__, 0)  # small weights have plain states, updated in place
    torch.empty(local.numel() * size, dtype=torch.uint8)


PAGED_FROM = 1e5  # elements of a weight whose states bitsandbytes pages (optim/optimizer.py, get_state_buffer)


_GATHERED = Part.BITSANDBYTES.replaces(
    "bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module(module)",
    why="wraps a weight that FSDP gathered in Params4bit, which cannot hold a fake tensor",
    until="Params4bit holds fake tensors",
)
_MATMUL = Part.BITSANDBYTES.replaces(
    "bitsandbytes:matmul(A, B, out, state, threshold, bias)",
    why="8-bit training runs another function on a CPU than on CUDA, whose jobs are traced on the CPU",
    until="fake CUDA tensors run in builds of torch without CUDA",
)
_DOUBLE = Part.BITSANDBYTES.replaces(
    "bitsandbytes.optim:AdEMAMix._get_state_double_buffer(self, p, dtype)",
    why="pages AdEMAMix's states even on the CPU (0.50), where a fake one cannot be paged",
    until="never: a trace has no managed memory",
)
_STATES = Part.BITSANDBYTES.replaces(
    "bitsandbytes.optim.optimizer:Optimizer8bit.get_state_buffer(self, p, dtype)",
    why="paged states are in CUDA managed memory, which torch's allocator does not count",
    until="never: a trace has no managed memory",
)
_TABLES = Part.BITSANDBYTES.relies_on(
    "bitsandbytes.functional:name2qmap",
    why="the code table that quantization keeps there is made of real values",
    until="Params4bit holds fake tensors",
)


@contextmanager
def _bitsandbytes(paging: Callable | None) -> Iterator[None]:
    """bitsandbytes (0.50) on fake tensors: a manager and code tables of the trace's own, and pages where it pages.

    Args:
        paging: as for fake_world(); None on a CPU, where bitsandbytes pages none.
    """
    if "bitsandbytes" not in sys.modules:
        yield
        return

    def restore(module) -> None:
        if getattr(module.weight, "quant_state", None) is None:
            module.weight.quant_state = module.quant_state

    def buffer(optimizer, weight, dtype=torch.float32, copies=()):
        paged = paging and optimizer.is_paged and weight.numel() >= PAGED_FROM
        with paging() if paged else nullcontext():
            return weight.new_zeros((*copies, *weight.shape), dtype=dtype)

    def double_buffer(optimizer, weight, dtype=torch.float32):
        # On a CPU bitsandbytes (0.50) pages this buffer, too, but cannot.
        if not paging and optimizer.is_paged and weight.numel() >= PAGED_FROM:
            raise InputError(
                "optim: bitsandbytes pages AdEMAMix's states on a CPU, too, which fails: use ademamix or ademamix_8bit"
            )
        return buffer(optimizer, weight, dtype, (2,))

    from bitsandbytes.functional import name2qmap
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    with (
        # A process-wide singleton: the Trainer registers its embeddings there for 32-bit states, and bitsandbytes
        # keeps them by position, so that an earlier trace's embeddings would decide over the next job's weights.
        mock.patch.dict(vars(manager)),
        # Quantization creates the 8-bit code table once per process and keeps it on the device for good. Every trace
        # creates its own, so that the first trace of a process allocates what all others do.
        mock.patch.dict(name2qmap, clear=True),
        _GATHERED.replaced(fix_4bit_weight_quant_state_from_module=restore),
        _STATES.replaced(get_state_buffer=buffer),
        _DOUBLE.replaced(_get_state_double_buffer=double_buffer),
        _MATMUL.replaced(matmul=matmul_on_cuda) if paging else nullcontext(),
    ):
        manager.initialize()
        yield


_ASSIGNMENT = Part.DETECTION.replaces(
    "scipy.optimize:linear_sum_assignment",
    why="losses match predictions with targets by the values of their costs",
)


def matched_in_order() -> AbstractContextManager:
    """Match predictions and targets in their order: scipy needs the costs, but how many match follows from shapes."""
    # Each loss has imported the function by name, where scipy is installed.
    losses = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.") and "linear_sum_assignment" in vars(module)
    ]
    return _ASSIGNMENT.replaced(losses, linear_sum_assignment=_match_in_order) if losses else nullcontext()


def _match_in_order(costs):
    import numpy

    matches = numpy.arange(min(costs.shape))
    return matches, matches


_KERNELS = Part.FP8.replaces(
    "transformers.integrations.finegrained_fp8:load_finegrained_fp8_kernel()",
    why="the kernels come from the hub and run on cards alone",
)


def counted_fp8_kernels() -> AbstractContextManager:
    """A context in which the finegrained-fp8 kernels allocate their outputs.

    They quantize activations as they go (finegrained_fp8_linear in transformers 5.23). DeepGEMM, which transformers
    prefers on Hopper, also holds a copy of the input, one byte an element.
    """
    kernels = SimpleNamespace(matmul=_matmul, grouped_matmul=_matmul, batched_matmul=_matmul)
    return _KERNELS.replaced(load_finegrained_fp8_kernel=lambda: kernels)


def _matmul(left, right, scales, *args, **kwargs):
    return torch.empty((*left.shape[:-1], right.shape[-2]), dtype=left.dtype)
