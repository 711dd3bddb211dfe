"""Logits of answers alone: where a prompt carries no labels, its logits are not computed while a model trains."""

import functools
import inspect

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from hf_memopt.errors import InputError
from hf_memopt.levers.replaced import replace

_IGNORED = -100


def keep_answer_logits(model) -> None:
    """Have a language model compute logits only at positions that predict a label in some sample of the batch.

    Args:
        model: a transformers model whose forward takes `logits_to_keep`, or peft's around one.

    Raises:
        InputError: its forward does not, or it computes its loss itself.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain = inspect.unwrap(type(inner).forward)
    if "logits_to_keep" not in inspect.signature(plain).parameters:
        raise InputError(f"logits_to_keep: {type(inner).__name__}.forward does not take it; use loss_chunk_size")
    if "self.loss_function(" not in inspect.getsource(plain):
        raise InputError(f"logits_to_keep: {type(inner).__name__} computes its loss itself; leave it out")
    forward = inner.forward

    @functools.wraps(forward)
    def with_fewer_logits(*args, labels=None, **kwargs):
        if labels is None or not inner.training or kwargs.get("logits_to_keep"):
            return forward(*args, labels=labels, **kwargs)
        shifted = kwargs.pop("shift_labels", None)
        if shifted is None:
            shifted = functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        kept = _answered(shifted)
        return forward(*args, labels=labels, logits_to_keep=kept, shift_labels=shifted[:, kept], **kwargs)

    replace(inner, "forward", with_fewer_logits)


def _answered(labels: torch.Tensor) -> torch.Tensor:
    """Positions (at least one) that have a label in any sample; all of them where labels have no values."""
    if isinstance(labels, FakeTensor):
        return torch.arange(labels.shape[1], device=labels.device)
    found = (labels != _IGNORED).any(dim=0).nonzero().squeeze(1)
    return found if len(found) else torch.zeros(1, dtype=torch.long, device=labels.device)
