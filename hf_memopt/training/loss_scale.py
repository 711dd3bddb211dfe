"""How the loss of a piece relates to the loss of the whole: a part of a sum, or a mean of its own."""

import torch

from hf_memopt.training.pieces import rows_of
from hf_memopt.training.random_state import RandomState


def loss_items(trainer, inputs) -> int:
    """What a mean loss is a mean over: labels that count, as transformers counts them; else samples."""
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0:
        return rows_of(inputs)
    if labels.is_floating_point():
        return labels.numel()
    if labels.dim() > 1 and trainer._loss_shifts_labels:
        labels = labels[..., 1:]
    return int(labels.ne(-100).sum())


def loss_is_a_sum(trainer, micro) -> bool:
    """Whether the trainer's loss is divided by the number of items that it is given, so that the losses of pieces add
    up; else it is a mean, and pieces have to be weighted.

    Found out once, by asking for the loss of one sample with two numbers of items: what a model or a subclass's
    compute_loss does with the number is nowhere written.
    """
    if micro.num_items is None:
        return False
    if trainer._loss_is_a_sum is None:
        trainer._loss_is_a_sum = _follows_the_number(trainer, micro)
    return trainer._loss_is_a_sum


def _follows_the_number(trainer, micro) -> bool:
    model = trainer.accelerator.unwrap_model(trainer.model)
    sample = _telling_sample(trainer, micro)
    before = RandomState.now()

    def loss(items) -> float:
        before.restore()
        inputs = trainer._prepare_inputs(dict(sample))
        return float(trainer.compute_loss(model, inputs, num_items_in_batch=items))

    stage = trainer._stage, trainer._share
    trainer._share = 1.0
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            once, twice = loss(micro.num_items), loss(micro.num_items * 2)
    finally:
        trainer._stage, trainer._share = stage
        before.restore()
    # Exactly a half for a sum; a term that does not follow the number (a router's balance) leaves it a little above.
    return twice < 0.75 * once


def _telling_sample(trainer, micro) -> dict:
    """The sample with the most items: a loss of 0 would tell nothing."""
    pieces = [trainer.split_batch(micro.inputs, row, row + 1) for row in range(micro.rows)]
    return max(pieces, key=lambda piece: loss_items(trainer, piece))
