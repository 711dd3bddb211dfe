"""A context in which models and trainers run on fake tensors: shapes without data.

While it lasts, replacements correct what libraries do differently with fake tensors, or would do on an accelerator.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import _device_constructors

from hf_memopt.estimator.accounting.known_values import tensor_from_values, tolist_from_values
from hf_memopt.estimator.patches.adapters import traceable_adapters
from hf_memopt.estimator.patches.cuda_autocast import cuda_autocast
from hf_memopt.estimator.patches.flex_attention import counted_flex_attention
from hf_memopt.estimator.patches.replacement import all_replaced, replaced


@contextmanager
def fake_world(accelerator: bool, flex: bool = False) -> Iterator[None]:
    """Run on fake CPU tensors.

    Autograd on fake CUDA tensors aborts in torch builds without CUDA (it needs the device guard). An accelerator's job
    is therefore traced on the CPU, too; replacements here and in accounting.kernels do what torch does on CUDA.

    Args:
        accelerator: the job is meant for an accelerator, where optimizers step over all weights at once (foreach).
        flex: levers use flex attention on its device.
    """
    # At the first `with torch.device(…)` torch caches its tensor constructors: that must not be the replaced ones.
    _device_constructors()
    fake_tensor = "torch._subclasses.fake_tensor:FakeTensor"
    replacements = {
        "torch.nn:Module.to": cast_in_place,
        "transformers.utils.import_utils:is_fake_tensor": lambda tensor: False,
        "torch:tensor": tensor_from_values(torch.tensor),
        f"{fake_tensor}.tolist": tolist_from_values(FakeTensor.tolist),
        f"{fake_tensor}.__deepcopy__": _deepcopy,
        "torch:compile": _uncompiled,
    }
    with (
        all_replaced(replacements),
        _foreach(accelerator),
        _bitsandbytes(),
        traceable_adapters(),
        _attention_without_dropout(accelerator),
        cuda_autocast() if accelerator else nullcontext(),
        counted_flex_attention() if flex else nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def cast_in_place(module: torch.nn.Module, *args, **kwargs) -> torch.nn.Module:
    """Module.to that only casts: torch cannot swap fake parameters, so each keeps its identity and gets new data."""
    dtype = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    if dtype is not None:
        for weight in (*module.parameters(), *module.buffers()):
            if weight.is_floating_point() and weight.dtype is not dtype:
                weight.data = weight.data.to(dtype)
    return module


def _deepcopy(tensor: FakeTensor, memo: dict):
    """A deep copy of a fake tensor. For a small one that keeps its value (`constant`, an optimizer's learning rate
    say), torch 2.13 would write a whole copy into the value's storage and corrupt the heap."""
    if tensor.constant is None:
        return torch.Tensor.__deepcopy__(tensor, memo)
    return memo.setdefault(id(tensor), tensor.detach().clone())


# Bytes for each element of the weight that torchao's compiled step takes beside its states, one weight at a time:
# what the profiler counts on a CPU with torch 2.13 and torchao 0.18, for fp32 and bf16 weights alike. No card was
# measured.
_QUANTIZED_STEP_BYTES = {"OptimState8bit": 8, "OptimState4bit": 26}


def _uncompiled(function=None, **kwargs):
    """torch.compile that leaves a function as it is, except torchao's step: fake tensors are not compiled."""
    if function is None:
        return _uncompiled
    return _quantized_step if getattr(function, "__module__", "") == "torchao.optim.adam" else function


def _quantized_step(weight, gradient, step, mean, *args) -> None:
    """The allocations of torchao's compiled step; run eagerly it would take several times as much."""
    local = getattr(mean, "_local_tensor", mean)
    size = _QUANTIZED_STEP_BYTES.get(type(local).__name__, 0)  # small weights have plain states, updated in place
    torch.empty(local.numel() * size, dtype=torch.uint8)


@contextmanager
def _bitsandbytes() -> Iterator[None]:
    """bitsandbytes (0.50) on fake tensors: a manager and code tables of the trace's own.

    Paged states are counted as if they stayed on the device: on a CPU bitsandbytes pages none but AdEMAMix's.
    """

    # A 4-bit weight that FSDP gathered is wrapped in Params4bit, which cannot hold a fake tensor.

    def restore(module) -> None:
        if getattr(module.weight, "quant_state", None) is None:
            module.weight.quant_state = module.quant_state

    if "bitsandbytes" not in sys.modules:
        yield
        return

    def double_buffer(optimizer, weight, dtype=torch.float32):
        return torch.zeros((2, *weight.shape), dtype=dtype)

    from bitsandbytes.functional import name2qmap

    with (
        # A process-wide singleton: the Trainer registers its embeddings there for 32-bit states, and bitsandbytes
        # keeps them by position, so that an earlier trace's embeddings would decide over the next job's weights.
        replaced("bitsandbytes.optim:GlobalOptimManager._instance", None),
        # Quantization creates the 8-bit code table once per process and keeps it on the device for good. Every trace
        # creates its own, so that the first trace of a process allocates what all others do.
        mock.patch.dict(name2qmap, clear=True),
        replaced("bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module", restore),
        replaced("bitsandbytes.optim:AdEMAMix._get_state_double_buffer", double_buffer),
    ):
        yield


@contextmanager
def _attention_without_dropout(accelerator: bool) -> Iterator[None]:
    """Attention without dropout, for which the CPU would store all scores. CUDA's flash kernel draws it inside."""
    if not accelerator:
        yield
        return
    attend = torch.nn.functional.scaled_dot_product_attention

    def without(query, key, value, attn_mask=None, dropout_p=0.0, **kwargs):
        return attend(query, key, value, attn_mask, **kwargs)

    with replaced("torch.nn.functional:scaled_dot_product_attention", without):
        yield


@contextmanager
def _foreach(accelerator: bool) -> Iterator[None]:
    """Adam over lists of tensors (foreach): torch's default on an accelerator, with one more copy of the weights."""
    if not accelerator:
        yield
        return
    with replaced("torch.optim.adam:_default_to_fused_or_foreach", lambda *args, **kwargs: (False, True)):
        yield
