"""Compute logits only where there are labels: not for prompts, while a model trains."""

import functools
import inspect
from contextlib import contextmanager

import torch

from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import IGNORED, has_no_values, inner_model, shifted_labels, uses_loss_function
from hf_memopt.levers.replaced import replace


def keep_answer_logits(model) -> None:
    """Make a language model compute logits only at positions that have a label in some sample of the batch.

    Args:
        model: a transformers model whose forward takes `logits_to_keep`, or peft's around one.

    Raises:
        InputError: its forward does not, or it does not call its `loss_function`.
    """
    inner = inner_model(model)
    if "logits_to_keep" not in inspect.signature(type(inner).forward).parameters:
        raise InputError(f"logits_to_keep: {type(inner).__name__}.forward does not take it; use loss_chunk_size")
    if not uses_loss_function(inner):
        raise InputError(f"logits_to_keep: {type(inner).__name__} computes its loss itself; leave it out")
    forward = inner.forward

    @functools.wraps(forward)
    def with_fewer_logits(*args, labels=None, **kwargs):
        asked_for = not inner.training and not getattr(inner, "loss_is_all", False)
        if labels is None or asked_for or kwargs.get("logits_to_keep"):
            return forward(*args, labels=labels, **kwargs)
        shifted = shifted_labels(labels, kwargs.pop("shift_labels", None))
        positions = _labeled_positions(shifted)
        return forward(*args, labels=labels, logits_to_keep=positions, shift_labels=shifted[:, positions], **kwargs)

    replace(inner, "forward", with_fewer_logits)


@contextmanager
def nothing_but_loss(model, true: bool = True):
    """Within this context evaluation needs the loss only, and computes no more logits than training does."""
    inner = inner_model(model)
    before = getattr(inner, "loss_is_all", False)  # nested where the estimator traces MemoryTrainer's own evaluation
    inner.loss_is_all = true
    try:
        yield
    finally:
        inner.loss_is_all = before


def _labeled_positions(labels: torch.Tensor) -> torch.Tensor:
    """Positions that have a label in any sample, at least one; all positions if the labels have no values."""
    if has_no_values(labels):
        return torch.arange(labels.shape[1], device=labels.device)
    positions = (labels != IGNORED).any(dim=0).nonzero().squeeze(1)
    return positions if len(positions) else torch.zeros(1, dtype=torch.long, device=labels.device)
