"""Selective activation checkpointing: of some layers, or of all operators of a layer but the expensive ones."""

import functools
from fractions import Fraction

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.replaced import replace
from hf_memopt.stack.vocabulary import CHECKPOINTING_KWARGS, ENABLE_CHECKPOINTING

_MOST_LAYERS = 1024  # the largest denominator of a ratio: more layers than any model has

_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_attention_math_for_mps.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def period_of(ratio: float) -> int:
    """Number of layers after which the pattern of checkpointed layers repeats."""
    return Fraction(ratio).limit_denominator(_MOST_LAYERS).denominator


def is_checkpointed(layer: int, ratio: float) -> bool:
    """True if a layer is checkpointed: a share `ratio` of all is, evenly spread, the last of each stretch."""
    share = Fraction(ratio).limit_denominator(_MOST_LAYERS)
    return (layer + 1) * share // 1 > layer * share // 1


# Keys of activation_checkpointing_kwargs that transformers' Trainer takes out and passes by their names.
_OF_TRAINER = ("every_n_layers", "offload")


def keep_chosen_layers(model: torch.nn.Module) -> None:
    """Have a model take activation_checkpointing_kwargs as TrainingArguments has them, for whoever enables
    checkpointing again.

    TRL 1.16 does so after log-probabilities and generation (models/utils.py, disable_gradient_checkpointing) and hands
    over the whole mapping, of which transformers 5.23 passes every_n_layers and offload to torch's checkpoint(), which
    refuses them. Without effect once TRL takes them out itself.
    """
    inner = inner_model(model)
    enable = getattr(inner, ENABLE_CHECKPOINTING, None)
    if enable is None:
        return

    @functools.wraps(enable)
    def enable_with(settings=None, **kwargs):
        settings = dict(settings or kwargs.pop(CHECKPOINTING_KWARGS, None) or {})
        kwargs = {name: settings.pop(name) for name in _OF_TRAINER if name in settings} | kwargs
        enable({"use_reentrant": False, **settings}, **kwargs)

    replace(inner, ENABLE_CHECKPOINTING, enable_with)


def checkpoint_in_part(model: torch.nn.Module, ratio: float | None, keeps: str | None) -> None:
    """Enable selective checkpointing, also for when the Trainer enables checkpointing again with its own settings.

    Args:
        ratio: share of the layers to checkpoint; None for all.
        keeps: what checkpointed layers store besides their inputs: "attention" (its outputs), "matmuls" (those and
            every second matmul's outputs), or None.

    Raises:
        InputError: the model does not support activation checkpointing.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    inner = inner_model(model)
    layers = [module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not getattr(inner, "supports_gradient_checkpointing", False):
        raise InputError(f"checkpoint_ratio, checkpoint_keeps: {type(inner).__name__} has no layers to checkpoint")
    enable = getattr(inner, ENABLE_CHECKPOINTING)

    @functools.wraps(enable)
    def enable_in_part(settings=None, **kwargs):
        settings = {"use_reentrant": False, **(settings or kwargs.pop(CHECKPOINTING_KWARGS, None) or {})}
        if keeps is not None:
            settings |= {"use_reentrant": False, "context_fn": functools.partial(_contexts, keeps)}
        enable(settings, **kwargs)
        if ratio is not None:
            for number, layer in enumerate(layers):
                layer.gradient_checkpointing = is_checkpointed(number, ratio)

    replace(inner, ENABLE_CHECKPOINTING, enable_in_part)
    enable_in_part()


def _contexts(keeps: str):
    """The contexts of the forward pass and of the recomputation, for torch.utils.checkpoint's `context_fn`."""
    matmuls = {False: 0, True: 0}

    def policy(context, operator, *args, **kwargs):
        if operator in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if keeps == "matmuls" and operator in _MATMULS:
            matmuls[context.is_recompute] += 1
            if matmuls[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
