"""Apply MemoryArguments to a model and its optimizer; the trainer and the estimator both call this."""

from typing import Any

from hf_memopt.levers.arguments import FEATURES, MemoryArguments
from hf_memopt.levers.replaced import replace
from hf_memopt.levers.sharded_gradients import reduce_at_once


def apply_levers(model, memory_args: MemoryArguments, label_smoothing: float = 0.0) -> None:
    """Apply the memory features of MemoryArguments to a model.

    Args:
        label_smoothing: of the loss, for loss_chunk_size.

    Raises:
        InputError: a memory feature does not support this model.
    """
    for feature in sorted(FEATURES, key=lambda feature: feature.order):
        feature.put_on(memory_args, model, label_smoothing)


def apply_to_trainer(trainer, memory_args: MemoryArguments, **host) -> None:
    """Apply the memory features of MemoryArguments to a trainer's optimizer and gradients.

    Args:
        host: keyword arguments of keep_on_host(), for optimizer_cpu_offload.
    """
    reduce_at_once(trainer)
    if memory_args.adam_mini or memory_args.optimizer_in_backward or memory_args.optimizer_cpu_offload:
        replace(trainer, "create_optimizer", _creating(trainer, memory_args, host))


def _creating(trainer, memory_args: MemoryArguments, host: dict[str, Any]):
    """A create_optimizer() that modifies the optimizer once, whether the trainer creates it or was given it."""
    create, changed = trainer.create_optimizer, []

    def create_changed(*args, **kwargs):
        if memory_args.adam_mini and trainer.optimizer is None:
            from hf_memopt.levers.adam_mini import AdamMini, settings_for

            trainer.optimizer_cls_and_kwargs = AdamMini, settings_for(trainer.model, trainer.args)
        optimizer = create(*args, **kwargs)
        if not any(optimizer is other for other in changed):
            changed.append(optimizer)
            for feature in FEATURES:
                feature.put_on_optimizer(memory_args, optimizer, host)
        return optimizer

    return create_changed
