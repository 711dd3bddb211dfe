"""What levers ask of a transformers language model and of its labels."""

import inspect

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

IGNORED = -100  # the label that PyTorch's cross entropy leaves out


def inner_model(model):
    """The transformers model within peft's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def asks_for_its_loss(model) -> bool:
    """Whether the forward of a model, or of a class of models, asks its `loss_function` for the loss, instead of
    computing it itself."""
    kind = model if isinstance(model, type) else type(model)
    return "self.loss_function(" in inspect.getsource(inspect.unwrap(kind.forward))


def shifted_labels(labels, given=None, ignore_index: int = IGNORED) -> torch.Tensor:
    """The label that each position predicts, as transformers shifts them (loss_utils.ForCausalLMLoss).

    Args:
        given: what the caller has shifted already.
    """
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if given is None else given


def without_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the estimator's and has a shape alone."""
    return isinstance(tensor, FakeTensor) and getattr(tensor, "known_value", None) is None
