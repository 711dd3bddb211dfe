"""Gradients that stay sharded between the micro-batches of a step.

Where transformers shards a model over processes without replicas (DistributedConfig), its Trainer lets every process
keep all gradients of every layer until the last micro-batch, four bytes a weight, and reduces them once. Here each
micro-batch's are reduced at once: memory for traffic, as accelerate's FSDP2 and ZeRO-3 have it. With replicas only the
exchange between them waits, which keeps parts alone.
"""

import contextlib

from hf_memopt.levers.replaced import replace


def reduce_at_once(trainer) -> None:
    """Have a Trainer of a model that transformers sharded reduce the gradients of every micro-batch."""
    mesh = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    if mesh is not None and mesh.dp_replicate_size == 1:
        replace(trainer, "_defer_fsdp_gradient_reduction", lambda: contextlib.nullcontext())
