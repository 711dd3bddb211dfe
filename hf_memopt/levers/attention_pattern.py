"""Attention patterns (sliding windows, blocks) for models that use transformers' mask and attention interfaces.

transformers looks up both the mask function and the kernel by the model's `_attn_implementation`. Registering a name
of our own changes one model and no other in the process. The pattern is stored in the model's configuration, which is
what a mask function receives (transformers 5.23, `masking_utils.create_causal_mask`).
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar

import torch

from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.replaced import replace
from hf_memopt.stack.vocabulary import CACHE

IMPLEMENTATION = "hf_memopt_pattern"
_BLOCKS = ("sparse_block_size", "num_local_blocks", "num_global_blocks")
# position_ids of the running forward pass, (batch, tokens). Mask functions do not receive them, but blocks are counted
# from where each packed sequence begins.
_POSITIONS: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)


def attend_by_pattern(model, setting: str, pattern: dict[str, int]) -> None:
    """Restrict a decoder's attention to a pattern.

    CUDA and ROCm use flex attention, which skips masked blocks; other devices use sdpa with the same mask, since flex
    attention has no backward on the CPU (torch 2.13).

    Args:
        model: a transformers model, or peft's around one.
        setting: `field=value`, for error messages.
        pattern: what `_overlay` reads, written into the text model's configuration: sliding_window, or
            sparse_block_size, num_local_blocks and num_global_blocks.

    Raises:
        InputError: the model does not use the attention interface, is not causal, or has dropout.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    inner = inner_model(model)
    if any(getattr(module, "attention_dropout", 0.0) for module in causal_attention(inner, setting)):
        raise InputError(f"{setting}: flex attention has no dropout: use a model with attention_dropout=0")
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    for config in text_configs(inner):
        for name in _BLOCKS:  # a saved configuration may hold an earlier run's
            vars(config).pop(name, None)
        vars(config).update(pattern)
        config._attn_implementation = IMPLEMENTATION
    _track_positions(inner, setting)


def causal_attention(inner, setting: str) -> list[torch.nn.Module]:
    """A decoder's attention modules.

    Raises:
        InputError: there are none, or they do not attend causally through the interface.
    """
    decoder = None if inner.config.is_encoder_decoder else inner.get_decoder()
    modules = [] if decoder is None else [module for module in decoder.modules() if hasattr(module, "is_causal")]
    if not modules or not (decoder._supports_flex_attn and decoder._supports_sdpa):
        raise InputError(
            f"{setting}: {inner.config.model_type} does not attend through transformers' attention interface with "
            "both sdpa and flex_attention: leave it out"
        )
    if not all(module.is_causal for module in modules):
        raise InputError(f"{setting}: {inner.config.model_type} also attends to later tokens: leave it out")
    return modules


def text_configs(inner) -> list:
    """The configurations that a decoder and its mask functions read; a composite model may hold a copy."""
    configs = inner.config.get_text_config(), inner.get_decoder().config
    return list({id(config): config for config in configs}.values())


def uses_flex(device) -> bool:
    """True if flex attention has a backward pass on a device."""
    return torch.device(device).type == "cuda"


def _attend(module, query, key, value, attention_mask, **kwargs):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    dense = attention_mask is None or isinstance(attention_mask, torch.Tensor)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa" if dense else "flex_attention"]
    return attend(module, query, key, value, attention_mask, **kwargs)


def _mask(
    *,
    q_length,
    kv_length,
    mask_function,
    config,
    attention_mask=None,
    allow_is_causal_skip=True,
    device="cpu",
    **kwargs,
):
    """Combine the pattern with the model's own mask: causality, padding, packed sequences, a layer's window."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    overlay, reach = _overlay(config)
    if kv_length > reach:
        positions = _positions(config, attention_mask, q_length, kv_length)
        if positions is not None:
            overlay = _at(positions.expand(kwargs["batch_size"], -1), overlay)
        mask_function, allow_is_causal_skip = _both(mask_function, overlay), False
    make = ALL_MASK_ATTENTION_FUNCTIONS["flex_attention" if uses_flex(device) else "sdpa"]
    return make(
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
        config=config,
        **kwargs,
    )


def _positions(config, attention_mask, q_length: int, kv_length: int) -> torch.Tensor | None:
    """Each token's position in its own sequence, (batch or 1, tokens): blocks are not counted from padding or from the
    previous sequences of a packed row. None where the position in the row is the same."""
    if getattr(config, "sparse_block_size", None) is None:
        return None  # a window does not depend on the position
    if attention_mask is not None:
        padded = attention_mask.ndim == 2 and attention_mask.shape[-1] == kv_length
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0) if padded else None
    positions = _POSITIONS.get()
    return positions if positions is not None and q_length == kv_length == positions.shape[-1] else None


def _overlay(config) -> tuple[Callable, int]:
    """A mask function to combine with a causal one, and the length up to which it masks nothing.

    It compares a column with a row: their difference would take 8 bytes for every pair of tokens.
    """
    block = getattr(config, "sparse_block_size", None)
    if block is None:
        window = config.sliding_window
        return lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx > q_idx - window, window
    local, first = config.num_local_blocks, config.num_global_blocks

    def overlay(batch_idx, head_idx, q_idx, kv_idx):
        near = kv_idx // block >= q_idx // block - local
        return near | (kv_idx < first * block) if first else near

    return overlay, (local + 1 + first) * block


def _both(mask_function: Callable, overlay: Callable) -> Callable:
    return lambda *indices: mask_function(*indices) & overlay(*indices)


def _at(positions: torch.Tensor, overlay: Callable) -> Callable:
    """Apply a mask function to positions in the tokens' own sequences instead of the row."""

    def of_sequence(batch_idx, head_idx, q_idx, kv_idx):
        return overlay(batch_idx, head_idx, positions[batch_idx, q_idx], positions[batch_idx, kv_idx])

    return of_sequence


def _track_positions(inner, setting: str) -> None:
    """Record position_ids for the mask function, and refuse a 4D mask, which would bypass the pattern."""
    forward, signature = inner.forward, inspect.signature(type(inner).forward)

    @functools.wraps(forward)
    def with_positions(*args, **kwargs):
        arguments = signature.bind_partial(inner, *args, **kwargs).arguments
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        # generate() with a static cache passes a 4D mask that was already made with the pattern.
        if mask is not None and mask.ndim == 4 and arguments.get(CACHE) is None:
            raise InputError(f"{setting}: the batch brings an attention_mask of its own: use one of them")
        # 3D positions (videos) are not positions in a sequence.
        token = _POSITIONS.set(positions if positions is not None and positions.ndim == 2 else None)
        try:
            return forward(*args, **kwargs)
        finally:
            _POSITIONS.reset(token)

    replace(inner, "forward", with_positions)


def attend_to_blocks(model, block: int, local: int, first: int) -> None:
    """Restrict every layer of a decoder to its own block, the preceding ones and the first ones, causally.

    A layer with a sliding window attends to the intersection of both. Packed sequences stay separate, and the blocks
    of each are counted from its first token.

    Args:
        block: tokens per block. Flex attention skips blocks of 128 tokens, so multiples of 128 work best.
        local: preceding blocks that a token attends to.
        first: first blocks of a sequence that all its tokens attend to.

    Raises:
        InputError: the model does not use transformers' attention interface, is not causal, or has dropout.
    """
    pattern = {"sparse_block_size": block, "num_local_blocks": local, "num_global_blocks": first}
    attend_by_pattern(model, f"sparse_block_size={block}", pattern)
