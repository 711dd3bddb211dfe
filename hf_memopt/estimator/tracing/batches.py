"""Batches as collators return them: tensors in dicts, lists and tuples, with anything else between."""

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.estimator.accounting.known_values import is_worth_knowing, set_value


def fake_batch(batch: Any):
    """A batch on fake tensors that know their values; to be made under the fake tensor mode."""
    from accelerate.utils import recursively_apply

    return recursively_apply(_fake, batch)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if not is_worth_knowing(tensor):
        return fake
    with _disable_current_modes():  # a copy: what the model changes in place must not change the next batch
        value = tensor.detach().cpu().clone()
    return set_value(fake, value)
