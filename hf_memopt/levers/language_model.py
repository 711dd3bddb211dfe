"""Helpers of the levers for transformers language models and their labels."""

import inspect

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

IGNORED = -100  # ignore_index of torch.nn.functional.cross_entropy


def inner_model(model):
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def uses_loss_function(model) -> bool:
    """True if forward() of a model or model class calls `self.loss_function`, rather than computing the loss itself.

    Read from its source: transformers 5.23 has no attribute that says so.
    """
    kind = model if isinstance(model, type) else type(model)
    return "self.loss_function(" in inspect.getsource(inspect.unwrap(kind.forward))


def shifted_labels(labels, shifted=None, ignore_index: int = IGNORED) -> torch.Tensor:
    """The label that each position predicts, shifted as in transformers' loss_utils.ForCausalLMLoss.

    Args:
        shifted: labels that the caller has shifted already.
    """
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shifted is None else shifted


def has_no_values(tensor: torch.Tensor) -> bool:
    """True if a tensor is a fake one of the estimator without a known value."""
    return isinstance(tensor, FakeTensor) and getattr(tensor, "known_value", None) is None
