"""The worst batch first: forward, backward and optimizer step on the largest batch that is going to come, undone."""

import itertools
import logging
from contextlib import contextmanager

import torch

from hf_memopt.data.lengths import relative_sizes
from hf_memopt.oom.classify import free_memory
from hf_memopt.trainer.optimizer_guard import torch_optimizer
from hf_memopt.trainer.random_state import RandomState
from hf_memopt.trainer.sample_order import batch_order
from hf_memopt.trainer.split import tensor_shapes

logger = logging.getLogger(__name__)
_LOOKED_AT = 200_000  # samples or batches


def try_worst_batch(trainer, model, loader) -> int | None:
    """Run the largest batch, in pieces if it must be, so that what does not fit shows before the first step.

    Weights, buffers, optimizer, gradients and random numbers are afterwards what they were, bit for bit. The size that
    fitted is what training begins with.

    Args:
        loader: the data loader that accelerate prepared.

    Returns:
        Samples of the pieces that it had to be run in; None where it fitted whole, or nothing was tried.
    """
    worst = worst_batch(loader, int(trainer.state.epoch or 0))
    if worst is None:
        logger.warning("probe_worst_batch: a stream has no largest batch; the first one is as good as any")
        return None
    inputs = loader.collate_fn([loader.dataset[index] for index in worst])
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    with _undone(trainer, model):
        items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        trainer.get_batch_samples(iter(()), 0, trainer.args.device)  # a window of its own
        trainer.accelerator.gradient_state._set_sync_gradients(False)  # no process waits for another
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
    """Positions of the samples in an epoch's batch with the most padded tokens; where the order cannot be known, of as
    many of the longest samples; None for a stream."""
    data = loader.dataset
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return None
    lengths = relative_sizes(data, _LOOKED_AT)
    order = batch_order(loader, epoch)
    if order is not None:
        batches = itertools.islice(order, _LOOKED_AT)
        return max(batches, key=lambda batch: len(batch) * max(lengths[index] for index in batch))
    size = getattr(loader, "total_batch_size", None) or loader.batch_size or 1
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])[:size]


def _optimizer_step(trainer) -> None:
    """An optimizer step that changes nothing: without gradients to speak of, at a rate of 0."""
    optimizer = torch_optimizer(trainer)
    if optimizer.state:  # gone on from a checkpoint: the states are there already
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                weight.grad.zero_()
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    trainer.optimizer.step()


@contextmanager
def _undone(trainer, model):
    """Whatever is done within is undone."""
    optimizer = torch_optimizer(trainer)
    began, fresh = RandomState.now(), not optimizer.state
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    trained = [weight for weight in model.parameters() if weight.requires_grad] if fresh else []
    kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in [*trained, *model.buffers()]]
    mode = {module: module.training for module in model.modules()}
    counted = trainer.accelerator.gradient_state.sync_gradients
    scaler = trainer.accelerator.scaler
    scale = scaler.state_dict() if scaler is not None else None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        model.zero_grad()
        if fresh:
            optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        for module, training in mode.items():
            module.training = training
        trainer.accelerator.gradient_state._set_sync_gradients(counted)
        if scale:
            scaler.load_state_dict(scale)
        began.restore()
        free_memory()
