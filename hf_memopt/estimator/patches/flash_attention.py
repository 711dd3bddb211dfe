"""Flash attention of any version in a trace, whatever is installed.

transformers' own code runs up to the kernel: masks, unpadding, layouts. In place of the kernels stand functions that
allocate on fake tensors what the kernels allocate on a GPU (accounting.flash_kernels).
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock

import torch
from torch.nn import functional

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.flash_kernels import BACKWARD, Attention, check_call, round_up
from hf_memopt.estimator.patches.flex_attention import own_attention
from hf_memopt.estimator.private_names import Part
from hf_memopt.hardware.attention_kernels import FLASH, flash_attention

_aten = torch.ops.aten
_UTILS = "transformers.modeling_flash_attention_utils"
# Models that import the function only where flash attention or `kernels` is installed (transformers 5.23).
_CONDITIONAL = ("bark", "falcon", "gpt_neo", "gptj")


class _FlashAttention(torch.autograd.Function):
    """Flash attention: saves queries, keys, values, output, log-sum-exp and the sequences' bounds.

    The tensors are (batch, tokens, heads, head size), or without batch where there are bounds.
    """

    @staticmethod
    def forward(ctx, query, key, value, bounds, longest, causal, flash, capability):
        # torch's operator for FlashAttention-2: its fake kernel allocates what all versions do, and its work is known.
        bounds_q, bounds_k = bounds or (None, None)
        tokens = longest or (query.shape[-3], key.shape[-3])
        out, logsumexp, *_ = _aten._flash_attention_forward.default(
            query, key, value, bounds_q, bounds_k, *tokens, 0.0, causal, False
        )
        ctx.save_for_backward(query, key, value, out, logsumexp, *(bounds or ()))
        ctx.settings = tokens, causal, flash, capability
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, logsumexp, *bounds = ctx.saved_tensors
        tokens, causal, flash, capability = ctx.settings
        call = Attention(
            sequences=len(bounds[0]) - 1 if bounds else query.shape[0],
            queries=query.shape[-3],
            keys=key.shape[-3],
            heads=query.shape[-2],
            kv_heads=key.shape[-2],
            head_size=query.shape[-1],
            dtype=query.dtype,
            causal=causal,
            ragged=bool(bounds),
            capability=capability,
        )
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        accumulators = BACKWARD[flash](call)
        gradients = _aten._flash_attention_backward.default(
            gradient, query, key, value, out, logsumexp, *(bounds or (None, None)), *tokens, 0.0, causal, out, out
        )
        del accumulators
        return *gradients, None, None, None, None, None


def _attend(flash: str, capability: float):
    """flash_attn_func and flash_attn_varlen_func of a version."""

    def run(query, key, value, bounds, longest, causal):
        size = query.shape[-1]
        check_call(flash, query.dtype, size, capability)
        padding = round_up(size, 8) - size  # the kernels take multiples of 8
        tensors = [functional.pad(part, [0, padding]) if padding else part for part in (query, key, value)]
        tensors = [part if part.stride(-1) == 1 else part.contiguous() for part in tensors]
        return _FlashAttention.apply(*tensors, bounds, longest, causal, flash, capability)[..., :size]

    def attend(query, key, value, causal=False, **_):
        return run(query, key, value, None, None, causal)

    def attend_ragged(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=1, max_seqlen_k=1, causal=False, **_
    ):
        longest = int(max_seqlen_q), int(max_seqlen_k)
        return run(query, key, value, (cu_seqlens_q, cu_seqlens_k), longest, causal)

    return attend, attend_ragged


def _kernel_arguments(is_causal: bool, max_seqlen_q=None, max_seqlen_k=None, **_) -> dict:
    """Select the arguments of transformers that count here (_process_flash_attention_kwargs)."""
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return {"causal": is_causal, **{name: value for name, value in lengths.items() if value is not None}}


_IMPORTED = Part.FLASH_ATTENTION.replaces(
    f"{_UTILS}:lazy_import_flash_attention(implementation, attention_wrapper, allow_all_kernels)",
    f"{_UTILS}:FLASH_ATTENTION_COMPATIBILITY_MATRIX",
    why="finds the installed kernels and takes the hub's for missing ones; a trace needs none of them",
    until="transformers loads a model with attention that is not installed",
)
_DISPATCH = Part.FLASH_ATTENTION.replaces(
    "transformers:PreTrainedModel._flash_attn_can_dispatch(self, flash_attn_version, is_init_check)",
    why="asks for the package and for a GPU of this machine",
    until="transformers loads a model with attention that is not installed",
)
_BOUNDS = Part.FLASH_ATTENTION.replaces(
    f"{_UTILS}:_get_unpad_data(attention_mask)",
    f"{_UTILS}:_is_packed_sequence(position_ids, batch_size)",
    f"{_UTILS}:prepare_fa_kwargs_from_position_ids(position_ids)",
    why="read the values of masks and positions to find where sequences end",
)
_AROUND = Part.FLASH_ATTENTION.relies_on(
    f"{_UTILS}:_pad_input(hidden_states, indices, batch, seqlen)",
    f"{_UTILS}:_unpad_input(hidden_states, attention_mask)",
    f"{_UTILS}:_flash_attention_forward(query_states, key_states, value_states)",
    why="what transformers does around the kernel runs as it is",
)


@contextmanager
def counted_flash_attention(
    capability: float = 0.0, packed: bool = False, names: Iterable[str] = ()
) -> Iterator[None]:
    """Make models load and train with any flash attention, without its package.

    Whether a device has the kernel is checked by hardware.attention.check_attention.

    Args:
        capability: compute capability of the device.
        packed: rows of a batch hold several sequences, if they come without a mask.
        names: of models that are there already, whose kernels of the hub were registered elsewhere, or really loaded.
    """
    from transformers import modeling_flash_attention_utils as utils
    from transformers import modeling_utils as models

    padding = _AROUND.original("_pad_input"), _AROUND.original("_unpad_input")
    functions = {name: _attend(name, capability) for name in FLASH}

    def register(implementation: str | None) -> None:  # as load_and_register_attn_kernel does
        if implementation is not None and implementation not in FLASH:
            flash = flash_attention(implementation) or "flash_attention_2"
            attention[implementation], masks[implementation] = attention[flash], masks[flash]

    def imported(implementation=None, *args, **kwargs):
        flash = flash_attention(implementation) or "flash_attention_2"
        # A model names this kernel itself (gpt-oss does), and transformers takes it in place of the requested one.
        allowed = FLASH[flash]
        if capability and not allowed.minimum <= capability <= allowed.maximum:
            raise InputError(
                f"attn_implementation: the model takes {implementation!r} for flash attention, which needs compute "
                f"capability {allowed.minimum} to {allowed.maximum}, not {capability}; use attn_implementation='eager'"
            )
        register(implementation)
        return (*functions[flash], None, *padding), (_kernel_arguments, dict)

    with ExitStack() as stack:
        attention, masks = stack.enter_context(own_attention())
        for name in filter(flash_attention, names):
            register(name)
        stack.enter_context(_IMPORTED.replaced([utils, models], lazy_import_flash_attention=imported))
        for module in filter(None, (sys.modules.get(_modeling(name)) for name in _CONDITIONAL)):
            stack.enter_context(_with_flash_attention(module))

        def can_dispatch(model, flash_attn_version: int, is_init_check: bool = False) -> bool:
            if not model._supports_flash_attn:
                raise ValueError(f"{type(model).__name__} does not support flash attention: use sdpa or eager")
            stack.enter_context(_with_flash_attention(sys.modules[type(model).__module__]))
            return True

        matrix = _IMPORTED.original("FLASH_ATTENTION_COMPATIBILITY_MATRIX")
        always = {version: {**row, "general_availability_check": lambda: True} for version, row in matrix.items()}
        with (
            _BOUNDS.replaced(
                _get_unpad_data=_unpad_nothing,
                _is_packed_sequence=lambda ids, batch_size: packed and ids is not None and batch_size == 1,
                prepare_fa_kwargs_from_position_ids=_one_sequence,
            ),
            _DISPATCH.replaced(_flash_attn_can_dispatch=can_dispatch),
            _IMPORTED.replaced([models], FLASH_ATTENTION_COMPATIBILITY_MATRIX=always),
        ):
            yield


def _modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def _with_flash_attention(module: ModuleType):
    """Lend a model's module the function that it has not imported."""
    name = "_flash_attention_forward"
    function = getattr(module, name, _AROUND.original(name))
    needs = module.__name__ in map(_modeling, _CONDITIONAL)
    return mock.patch.object(module, name, function, create=True) if needs else ExitStack()


def _unpad_nothing(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Positions of the tokens that are no padding, the sequences' bounds and the longest: none has any padding."""
    batch, tokens = attention_mask.shape
    indices = torch.empty(batch * tokens, dtype=torch.int64, device=attention_mask.device)
    return indices, torch.empty(batch + 1, dtype=torch.int32, device=attention_mask.device), tokens


def _one_sequence(position_ids: torch.Tensor):
    """Bounds and longest of packed sequences, as if a row held one: each further one pads the accumulators by a
    block."""
    bounds = torch.empty(2, dtype=torch.int32, device=position_ids.device)
    return (bounds, bounds), (position_ids.numel(), position_ids.numel())
