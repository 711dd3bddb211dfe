"""A context in which models and trainers run on tensors that have shapes and no bytes.

What real code does differently when it meets fake tensors, or would do differently on an accelerator, is put right
for as long as the context lasts.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import _device_constructors

from hf_memopt.estimator.accounting.known_values import list_of, tensor_of
from hf_memopt.estimator.patches.adapters import traceable_adapters
from hf_memopt.estimator.patches.cuda_autocast import cuda_autocast
from hf_memopt.estimator.patches.flex_attention import counted_flex_attention


@contextmanager
def fake_world(accelerator: bool, flex: bool = False) -> Iterator[None]:
    """Run on fake CPU tensors.

    A fake CUDA tensor aborts on builds without CUDA, so an accelerator's job is traced on the CPU too, and what torch
    does otherwise there is put right here and in the ledger.

    Args:
        accelerator: the job is meant for an accelerator, where optimizers step over all weights at once (foreach).
        flex: it is meant for one where levers attend through flex attention.
    """
    # From the first `with torch.device(…)` on torch remembers which functions make tensors: not those below.
    _device_constructors()
    with (
        mock.patch.object(torch.nn.Module, "to", cast_in_place),
        # transformers builds every attention mask when it sees a fake tensor, as if it were exporting the model.
        mock.patch("transformers.utils.import_utils.is_fake_tensor", lambda tensor: False),
        mock.patch.object(torch, "tensor", tensor_of(torch.tensor)),
        mock.patch.object(FakeTensor, "tolist", list_of(FakeTensor.tolist)),
        _foreach(accelerator),
        _bitsandbytes(),
        traceable_adapters(),
        _attention_without_dropout(accelerator),
        mock.patch.object(FakeTensor, "__deepcopy__", _copied, create=True),
        mock.patch.object(torch, "compile", _uncompiled),
        cuda_autocast() if accelerator else nullcontext(),
        counted_flex_attention() if flex else nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def cast_in_place(module: torch.nn.Module, *args, **kwargs) -> torch.nn.Module:
    """Module.to without the move, which cannot swap fake weights; a cast keeps the parameter and changes its data."""
    dtype = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    if dtype is not None:
        for weight in (*module.parameters(), *module.buffers()):
            if weight.is_floating_point() and weight.dtype is not dtype:
                weight.data = weight.data.to(dtype)
    return module


def _copied(tensor: FakeTensor, memo: dict):
    """A deep copy of a fake tensor. torch's writes into the storage of the value that a small one keeps beside its
    shape, an optimizer's learning rate say, and corrupts the heap (torch 2.13)."""
    if tensor.constant is None:
        return torch.Tensor.__deepcopy__(tensor, memo)
    return memo.setdefault(id(tensor), tensor.detach().clone())


# Bytes for each element of the weight that torchao's compiled step takes beside its states, one weight at a time:
# what the profiler counts on a CPU with torch 2.13 and torchao 0.18, for fp32 and bf16 weights alike. No card was
# measured.
_QUANTIZED_STEP_BYTES = {"OptimState8bit": 8, "OptimState4bit": 26}


def _uncompiled(function=None, **kwargs):
    """torch.compile for tensors that nothing is computed of."""
    if function is None:
        return _uncompiled
    return _quantized_step if getattr(function, "__module__", "") == "torchao.optim.adam" else function


def _quantized_step(weight, gradient, step, mean, *args) -> None:
    """What torchao's step allocates once it is compiled; uncompiled it would take several times as much."""
    local = getattr(mean, "_local_tensor", mean)
    size = _QUANTIZED_STEP_BYTES.get(type(local).__name__, 0)  # small weights have plain states, updated in place
    torch.empty(local.numel() * size, dtype=torch.uint8)


@contextmanager
def _bitsandbytes() -> Iterator[None]:
    """bitsandbytes wraps a 4-bit weight that FSDP gathered in its own class, which cannot hold a fake tensor.

    Paged states are counted as if they stayed on the device: on a CPU bitsandbytes pages none but AdEMAMix's (0.50).
    """

    def restore(module) -> None:
        if getattr(module.weight, "quant_state", None) is None:
            module.weight.quant_state = module.quant_state

    if "bitsandbytes" not in sys.modules:
        yield
        return

    def double_buffer(optimizer, weight, dtype=torch.float32):
        return torch.zeros((2, *weight.shape), dtype=dtype)

    with (
        mock.patch("bitsandbytes.nn.modules.fix_4bit_weight_quant_state_from_module", restore),
        mock.patch("bitsandbytes.optim.AdEMAMix._get_state_double_buffer", double_buffer),
    ):
        yield


@contextmanager
def _attention_without_dropout(accelerator: bool) -> Iterator[None]:
    """Flash attention draws dropout inside its kernel; on a CPU it would take the path that keeps all scores."""
    if not accelerator:
        yield
        return
    attend = torch.nn.functional.scaled_dot_product_attention

    def without(query, key, value, attn_mask=None, dropout_p=0.0, **kwargs):
        return attend(query, key, value, attn_mask, **kwargs)

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", without):
        yield


@contextmanager
def _foreach(accelerator: bool) -> Iterator[None]:
    """torch steps over lists of tensors where they lie on an accelerator, which costs one more copy of the weights."""
    if not accelerator:
        yield
        return
    with mock.patch("torch.optim.adam._default_to_fused_or_foreach", lambda *args, **kwargs: (False, True)):
        yield
