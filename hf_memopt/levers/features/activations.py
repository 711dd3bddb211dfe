"""activation_compression and activation_offload: what waits for the backward pass in 8 bits, or in host memory."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.change import Change
from hf_memopt.levers.feature import Feature

COMPRESSION = Change(
    settings={"activation_compression": "int8"},
    applies=lambda job: job.memory_args.activation_compression is None,
    effect="activations are kept in 8 bits",
)
ACTIVATION_OFFLOAD = Change(
    settings={"activation_offload": True},
    applies=lambda job: job.discrete_memory and not job.memory_args.activation_offload,
    effect="activations wait in host memory for the backward pass",
)


@dataclass
class Activations(Feature):
    activation_compression: str | None = field(
        default=None,
        metadata={"help": "int8: store activations, or the layer inputs that checkpointing stores, in 8 bits."},
    )
    activation_offload: bool = field(
        default=False, metadata={"help": "Offload activations to host memory between forward and backward."}
    )
    choices: ClassVar = {"activation_compression": ("int8",)}
    order: ClassVar = 3  # around layers that checkpointing and streaming have changed
    proposed: ClassVar = COMPRESSION

    @staticmethod
    def refused(on, facts):
        for name in ("activation_compression", "activation_offload"):
            if not getattr(on, name):
                continue
            if facts.fields.get("torch_compile"):
                yield f"torch_compile decides which activations to save: leave {name} out"
            if facts.engine.zero_stage == 3:
                # Saved weights are recognized by their storage, and ZeRO-3 allocates another one at every gather.
                yield f"{name} would store the weights that ZeRO-3 gathers: leave it out, or use fsdp2 or zero2"

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.activation_offload:
            from hf_memopt.levers.activation_offload import offload_activations

            offload_activations(model, compressed=on.activation_compression is not None)
        elif on.activation_compression is not None:
            from hf_memopt.levers.activation_compression import compress_activations

            compress_activations(model)
