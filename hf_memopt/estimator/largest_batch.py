"""The largest batch of a Trainer's data: its longest samples, as its own loader and collator return them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch

from hf_memopt.data.sample_batches import packed_batches, relative_sizes, sample_lengths
from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.engine_tensors import tensors_in
from hf_memopt.estimator.patches.trace_errors import users_code
from hf_memopt.estimator.tracing.process_state import generators_kept
from hf_memopt.estimator.tracing.rollouts import generates
from hf_memopt.levers.token_budget import samples_within

_SAMPLED_ROWS = 10_000  # rows among which the longest samples are searched
_COLLATED_ROWS = 32  # of these, rows whose size as a batch decides where their columns do not


def largest_batch(trainer):
    """The micro-batch with the longest samples.

    Raises:
        InputError: the trainer has no data, or its data set or collator fails.
    """
    from transformers import Trainer

    if trainer.train_dataset is None and type(trainer).get_train_dataloader is Trainer.get_train_dataloader:
        raise InputError("trainer.train_dataset is None: the estimate needs samples to know the batch's size")
    if generates(trainer):
        return _prompts(trainer)
    budget = getattr(getattr(trainer, "memory_args", None), "max_tokens_per_batch", None)
    with _left_as_it_was(trainer), users_code("the trainer's data"):
        batch = _largest(trainer.get_train_dataloader(), trainer.args.per_device_train_batch_size, budget)
    batch = trainer.joined(batch) if hasattr(trainer, "joined") else batch
    # Of texts a loss makes tokens: rerankers of sentence-transformers.
    columns = batch.values() if isinstance(batch, Mapping) else ()
    texts = any(isinstance(column, list | tuple) and column and isinstance(column[0], str) for column in columns)
    if not texts and not any(True for _ in tensors_in(batch)):
        raise InputError("the trainer's collator returns no tensors for its longest samples")
    return batch


def _prompts(trainer) -> list[dict]:
    """The rows of a generation batch: the longest prompt's, and for one sample the shortest, so that prompts are
    padded as real ones are."""
    with _left_as_it_was(trainer), users_code("the trainer's data"):
        loader = trainer.get_train_dataloader()
        data = getattr(loader, "dataset", None)
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            return next(iter(loader))
        count = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        sizes = [len(str(row["prompt"])) for row in data.select_columns(["prompt"]).take(_SAMPLED_ROWS)]
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        rows = [data[index] for index in dict.fromkeys([*order[:1], *order[-_COLLATED_ROWS:]])]
        tokens, *_ = trainer._tokenize_prompts([row["prompt"] for row in rows])
        order = sorted(range(len(rows)), key=lambda index: len(tokens[index]))
        return [rows[order[-1]]] * (count - 1) + [rows[order[0 if count > 1 else -1]]]


def largest_eval_batch(trainer):
    """The largest evaluation batch; None without evaluation data."""
    data = trainer.eval_dataset
    if data is None:
        return None
    size = trainer.args.per_device_eval_batch_size
    with _left_as_it_was(trainer), users_code("the trainer's evaluation data"):
        names = list(data) if isinstance(data, dict) else [None]
        batches = [_largest(trainer.get_eval_dataloader(name), size) for name in names]
    batch = max(batches, key=_elements, default=None)
    return trainer.joined(batch) if batch is not None and hasattr(trainer, "joined") else batch


@contextmanager
def _left_as_it_was(trainer) -> Iterator[None]:
    """Loaders note themselves on the trainer, and in accelerate's list of loaders whose states it saves; iterating
    over one draws random numbers."""
    loaders = list(trainer.accelerator._dataloaders)
    try:
        with mock.patch.dict(vars(trainer)), mock.patch.dict(vars(trainer.accelerator)), generators_kept():
            yield
    finally:
        trainer.accelerator._dataloaders[:] = loaders


def _largest(loader, size: int, budget: int | None = None):
    """The largest batch of a loader.

    Args:
        size: samples of a batch, where the loader does not say.
        budget: tokens of a batch, which then decide how many samples it has.
    """
    data, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    if collate is None or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return next(iter(loader), None)
    if (packed := packed_batches(loader)) is not None:
        return collate([data[index] for index in packed.largest()])
    sizes = (getattr(part, "batch_size", None) for part in (loader, getattr(loader, "batch_sampler", None)))
    micro = next((number for number in sizes if isinstance(number, int)), size)
    if budget is not None:
        micro = samples_within(budget, max(sample_lengths(data)))
    longest, *mixed = _longest(data, collate, micro)
    batches = [collate([data[index] for index in longest])]
    for indices in mixed:
        with suppress(Exception):  # of any kind: a collator that cannot pad takes rows of one length alone
            batches.append(collate([data[index] for index in indices]))
    return max(batches, key=_weight)


def _longest(data, collate, count: int) -> list[list[int]]:
    """Indices of the longest samples, repeated where there are fewer. Where they have one length and other samples are
    shorter, also with one of those in place of the last: a batch of the same shape with padding, and so with a mask,
    takes more memory, and real data give both."""
    sizes = relative_sizes(data, _SAMPLED_ROWS)
    order = sorted(range(min(len(sizes), _SAMPLED_ROWS)), key=sizes.__getitem__, reverse=True)
    if "input_ids" not in (getattr(data, "column_names", None) or ("input_ids",)):
        # Pairs, prompts and answers: how long the batch becomes depends on how the collator joins them.
        first = order[: max(_COLLATED_ROWS, 2 * count)]
        collated = {index: _weight(collate([data[index]])) for index in first}
        order = sorted(first, key=collated.__getitem__, reverse=True) + order[len(first) :]
    longest = (order * math.ceil(count / max(1, len(order))))[:count]
    if count == 1 or sizes[longest[-1]] < sizes[longest[0]]:
        return [longest]
    shorter = [index for index in order if sizes[index] < sizes[longest[0]]]
    # Sizes in characters may be one size in tokens: the shortest is padded if any is.
    return [longest, *([*longest[:-1], index] for index in dict.fromkeys([*shorter[:1], *shorter[-1:]]))]


def _weight(batch: Any) -> tuple[int, bool]:
    """The sort key of batches: elements, and of equally many a padded one's are more."""
    return _elements(batch), is_padded(batch)


def _elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))


def is_padded(batch: Any) -> bool:
    """True if a batch is padded or packed."""
    tensors = batch if isinstance(batch, Mapping) else {}
    positions, mask = tensors.get("position_ids"), tensors.get("attention_mask")
    packed = isinstance(positions, torch.Tensor) and bool((positions.diff(dim=-1) < 0).any())  # they start again
    return packed or (isinstance(mask, torch.Tensor) and not bool(mask.all()))
