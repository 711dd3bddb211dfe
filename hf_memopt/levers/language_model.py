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
    """True if forward() of a model or model class calls `self.loss_function`, rather than computing the loss itself,
    and that of a model is the next token's.

    Read from its source: transformers 5.23 has no attribute that says so.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    kind = model if isinstance(model, type) else type(model)
    calls = "self.loss_function(" in inspect.getsource(inspect.unwrap(kind.forward))
    return calls and (kind is model or model.loss_function is ForCausalLMLoss)


# Tasks whose models predict the next token -> the class of transformers that makes them.
_NEXT_TOKEN = {
    "causal-lm": "AutoModelForCausalLM",
    "image-text-to-text": "AutoModelForImageTextToText",
    "multimodal-lm": "AutoModelForMultimodalLM",
}


def predicts_next_token(task: str, config) -> bool:
    """True if the loss of a task's model is its loss_function of the next token; of a checkpoint's own code, too."""
    import transformers

    auto = getattr(transformers, _NEXT_TOKEN.get(task, ""), None)
    kind = auto._model_mapping.get(type(config), None) if auto else None
    return auto is not None and (kind is None or uses_loss_function(kind))


def shifted_labels(labels, shifted=None, ignore_index: int = IGNORED) -> torch.Tensor:
    """The label that each position predicts, shifted as in transformers' loss_utils.ForCausalLMLoss.

    Args:
        shifted: labels that the caller has shifted already.
    """
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shifted is None else shifted


def has_no_values(tensor: torch.Tensor) -> bool:
    """True if a tensor is a fake one of the estimator without a known value."""
    return isinstance(tensor, FakeTensor) and getattr(tensor, "known_value", None) is None
