"""Batches as collators return them: tensors in dicts, lists and tuples, with anything else between."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.estimator.accounting.known_values import is_worth_knowing, set_value


def tensors_in_batch(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in_batch(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in_batch(value)


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
