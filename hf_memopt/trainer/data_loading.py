"""The samples of batches, and those that the Trainer does not make: by a token budget, for sequence parallelism."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate.data_loader import SeedableRandomSampler
from transformers.trainer_utils import seed_worker

from hf_memopt.data.sample_batches import PackedBatches, sample_lengths, with_positions
from hf_memopt.errors import InputError
from hf_memopt.levers.refusals import WHOLE_SAMPLES
from hf_memopt.levers.sliding_window import has_window
from hf_memopt.levers.token_budget import TokenBudgetBatches

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer


def sequence_parallel_collator(trainer: "MemoryTrainer"):
    """The trainer's collator with the position_ids that Ulysses needs in every batch.

    Raises:
        InputError: a memory argument needs whole sequences.
    """
    names = [*WHOLE_SAMPLES]
    if trainer.memory_args.sliding_window and not has_window(type(trainer.model.config.get_text_config())):
        names.append("sliding_window")
    if trainer.packing:
        raise InputError("packing needs whole sequences, which sequence parallelism divides: leave it out")
    for name in names:
        if getattr(trainer.memory_args, name):
            raise InputError(f"{name} needs whole sequences, which sequence parallelism divides: leave it out")
    return with_positions(trainer.data_collator, trainer.get_sp_size())


def loader_by_tokens(trainer: "MemoryTrainer"):
    """A data loader whose batches stay within max_tokens_per_batch or the trainer's `packing`, prepared by accelerate.

    Trainer._get_dataloader (transformers 5.23) knows batches of a fixed size only; the arguments below are those that
    it passes to torch's DataLoader, and its two private methods drop the columns that the model does not take.

    Raises:
        InputError: the dataset is a stream, or a sample is longer than the budget.
    """
    data, budget = trainer.train_dataset, trainer.memory_args.max_tokens_per_batch
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        what = "packing" if trainer.packing else f"max_tokens_per_batch={budget}"
        raise InputError(f"{what} needs every sample's length: a stream has none, leave it out")
    args, collator = trainer.args, trainer.data_collator
    lengths = sample_lengths(data)
    if hasattr(data, "column_names"):
        data = trainer._remove_unused_columns(data, description="Training")
    else:
        collator = trainer._get_collator_with_removed_columns(collator, description="Training")
    seed = args.seed if args.data_seed is None else args.data_seed
    sampler = SeedableRandomSampler(data, data_seed=seed)
    if trainer.packing:
        batches = PackedBatches(
            sampler, lengths, trainer.packing, args.per_device_train_batch_size, trainer.batches, seed
        )
    else:
        batches = TokenBudgetBatches(sampler, lengths, budget, trainer.batches, seed)
    loader = torch.utils.data.DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=collator,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
        worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    )
    return trainer.accelerator.prepare(loader)


def batch_order(loader, epoch: int) -> Iterator[list[int]] | None:
    """Dataset indices of this process's batches in an epoch; None where the sample order is not known.

    Read from a copy of the sampler, so that the real one does not advance.
    """
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
