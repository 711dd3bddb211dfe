"""Apply MemoryArguments to a model and its optimizer; the trainer and the estimator both call this."""

import contextlib

from hf_memopt.levers.arguments import FEATURES, MemoryArguments
from hf_memopt.levers.replaced import replace


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
    features = [feature for feature in FEATURES if feature.of_optimizer and feature.is_on(memory_args)]
    if not features:
        return
    create, changed = trainer.create_optimizer, []

    def create_changed(*args, **kwargs):
        """Change the optimizer once, whether the trainer creates it or was given it."""
        if trainer.optimizer is None:
            for feature in features:
                feature.choose_optimizer(trainer)
        optimizer = create(*args, **kwargs)
        if not any(optimizer is other for other in changed):
            changed.append(optimizer)
            for feature in features:
                feature.put_on_optimizer(optimizer, host)
        return optimizer

    replace(trainer, "create_optimizer", create_changed)


def reduce_at_once(trainer) -> None:
    """Make a Trainer reduce gradients after every micro-batch, if transformers sharded its model without replicas.

    Where transformers shards a model without replicas (DistributedConfig), its Trainer (5.23) keeps the unsharded
    gradients of all layers until the last micro-batch, four bytes per weight, and reduces them once. Reducing those of
    each micro-batch, as accelerate's FSDP2 and ZeRO-3 do, needs less memory and more communication. With replicas only
    the all-reduce between them is deferred, and gradients stay sharded anyway.
    """
    mesh = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    if mesh is not None and mesh.dp_replicate_size == 1:
        replace(trainer, "_defer_fsdp_gradient_reduction", lambda: contextlib.nullcontext())
