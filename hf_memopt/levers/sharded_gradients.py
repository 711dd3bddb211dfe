"""Reduce gradients after every micro-batch, so that they stay sharded during gradient accumulation.

Where transformers shards a model without replicas (DistributedConfig), its Trainer (5.23) keeps the unsharded
gradients of all layers until the last micro-batch, four bytes per weight, and reduces them once. Reducing those of
each micro-batch, as accelerate's FSDP2 and ZeRO-3 do, needs less memory and more communication. With replicas only the
all-reduce between them is deferred, and gradients stay sharded anyway.
"""

import contextlib

from hf_memopt.levers.replaced import replace


def reduce_at_once(trainer) -> None:
    """Make a Trainer reduce gradients after every micro-batch, if transformers sharded its model without replicas."""
    mesh = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    if mesh is not None and mesh.dp_replicate_size == 1:
        replace(trainer, "_defer_fsdp_gradient_reduction", lambda: contextlib.nullcontext())
