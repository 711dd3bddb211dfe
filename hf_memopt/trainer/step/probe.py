"""Tries the largest batch before training: forward, backward and optimizer step, all undone afterwards."""

import itertools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hf_memopt.data.sample_batches import packed_batches, relative_sizes
from hf_memopt.oom.classify import free_memory
from hf_memopt.trainer.data_loading import batch_order
from hf_memopt.trainer.step.optimizer_guard import torch_optimizer
from hf_memopt.trainer.step.split import tensor_shapes
from hf_memopt.trainer.step.step_state import RandomState

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

logger = logging.getLogger(__name__)
_MOST_SEARCHED = 200_000  # samples or batches


def try_worst_batch(trainer: "MemoryTrainer", model, loader) -> int | None:
    """Run the largest batch, in chunks if necessary, so that one that does not fit shows before the first step.

    Weights, buffers, optimizer, gradients and random states are restored bit for bit. Training starts with the chunk
    size that fitted.

    Args:
        loader: the data loader, prepared by accelerate.

    Returns:
        The chunk size, in samples; None where the batch fitted whole, or for a stream.
    """
    worst = worst_batch(loader, int(trainer.state.epoch or 0))
    if worst is None:
        logger.warning("probe_worst_batch: the largest batch of a stream is not known, so none is tried")
        return None
    inputs = loader.collate_fn([loader.dataset[index] for index in worst])
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    with _restored(trainer, model):
        items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        trainer.get_batch_samples(iter(()), 0, trainer.args.device)  # a window of its own
        # As the Trainer sets it before all micro-batches but the last (_run_epoch, transformers 5.23), so that no
        # process waits for the gradients of another. accelerate 1.15 has no public setter.
        trainer.accelerator.gradient_state._set_sync_gradients(False)
        trainer.training_step(model, inputs, items)
        _optimizer_step(trainer)
    micro = trainer._runner.window.started[0]
    reading = trainer._pressure.reader.read()
    trainer._event(
        "worst_batch_fits",
        shapes=tensor_shapes(inputs),
        dataset_indices=list(worst),
        samples_at_once=micro.size,
        peak_allocated=reading.peak_allocated,
    )
    return micro.size if micro.size < micro.samples else None


def worst_batch(loader, epoch: int) -> list[int] | None:
    """Dataset indices of the batch with the most padded tokens in an epoch.

    Where the sample order is not known, the longest samples, as many as a batch has; None for a stream.
    """
    data = loader.dataset
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return None
    if (packed := packed_batches(loader)) is not None:
        return packed.largest()
    lengths = relative_sizes(data, _MOST_SEARCHED)
    order = batch_order(loader, epoch)
    if order is not None:
        batches = itertools.islice(order, _MOST_SEARCHED)
        return max(batches, key=lambda batch: len(batch) * max(lengths[index] for index in batch))
    size = getattr(loader, "total_batch_size", None) or loader.batch_size or 1
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])[:size]


def _optimizer_step(trainer: "MemoryTrainer") -> None:
    """Run an optimizer step with zero gradients and a learning rate of 0, so that its states are allocated."""
    optimizer = torch_optimizer(trainer)
    if optimizer.state:  # resumed from a checkpoint: they are allocated already
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                weight.grad.zero_()
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    trainer.optimizer.step()


@contextmanager
def _restored(trainer: "MemoryTrainer", model):
    """A context after which trainer and model are what they were before."""
    optimizer = torch_optimizer(trainer)
    random_state, fresh = RandomState.now(), not optimizer.state
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    trained = [weight for weight in model.parameters() if weight.requires_grad] if fresh else []
    copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in [*trained, *model.buffers()]]
    modes = {module: module.training for module in model.modules()}
    sync_gradients = trainer.accelerator.gradient_state.sync_gradients
    scaler = trainer.accelerator.scaler
    scale = scaler.state_dict() if scaler is not None else None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in copies:
                tensor.copy_(before)
        model.zero_grad()
        if fresh:
            optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        for module, training in modes.items():
            module.training = training
        trainer.accelerator.gradient_state._set_sync_gradients(sync_gradients)
        if scale:
            scaler.load_state_dict(scale)
        random_state.restore()
        free_memory()
