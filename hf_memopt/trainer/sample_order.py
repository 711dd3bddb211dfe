"""The samples that a batch consists of, from a copy of the sampler, so that the real one does not advance."""

import copy
import itertools
from collections.abc import Iterator

import torch


def batch_indices(loader, epoch: int, number: int) -> list[int] | None:
    """Dataset indices of a batch; None where the sample order is not known.

    Args:
        loader: the data loader, prepared by accelerate.
        number: index of the batch in its epoch, counted for this process.
    """
    order = batch_order(loader, epoch)
    return next(itertools.islice(order, number, None), None) if order is not None else None


def batch_order(loader, epoch: int) -> Iterator[list[int]] | None:
    """Dataset indices of this process's batches in an epoch; None where the sample order is not known."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset):
        return None
    batches = copy.copy(batches)
    inner = batches
    while hasattr(inner, "batch_sampler"):  # accelerate 1.15's BatchSamplerShard and SkipBatchSampler
        inner.batch_sampler = copy.copy(inner.batch_sampler)
        inner = inner.batch_sampler
    if not hasattr(inner, "sampler"):
        return None
    sampler = inner.sampler = copy.copy(inner.sampler)
    if type(sampler).__name__ == "SeedableRandomSampler":
        sampler.generator = None if sampler.generator is None else torch.Generator()
        sampler.epoch = epoch
    elif not isinstance(sampler, torch.utils.data.SequentialSampler):
        return None
    return iter(batches)
