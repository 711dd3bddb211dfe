"""activation_compression and activation_offload: what waits for the backward pass in 8 bits, or in host memory."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.change import Change
from hf_memopt.levers.feature import Feature, Knob

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
# Bytes of 8-bit activations of those in 16 bits (benchmarks/results/levers.json: 0.516, and 0.258 of 32 bits).
COMPRESSED = {2: 0.516, 4: 0.258}
# Eager kernels on a CPU: 1.44 of the plain step's time (benchmarks/results/levers.json).
_COMPRESSION_ON_CPU = 0.44


def _offered(spec, task: str, engine) -> bool:
    fixed = spec.memory_args.activation_compression or spec.memory_args.activation_offload
    return not fixed and not engine.shards_weights


def _compressed_bytes(kinds, growing, sketch, choice) -> None:
    width = 2 if sketch.job.fields.get("bf16") or sketch.job.fields.get("fp16") else 4
    kinds["activations"] -= growing * (1 - COMPRESSED[width])


def _compressed_seconds(seconds, cost, choice) -> float:
    if cost.sketch.job.device.backend == "cpu":
        return seconds * (1 + _COMPRESSION_ON_CPU)
    # activation_compression.py, fused: read, written at half the width, copied into place; and back
    return seconds + 4 * cost.sketch.activations(choice) / cost.memory_rate


def _offloaded_bytes(kinds, growing, sketch, choice) -> None:
    kinds["activations"] -= growing


_PLANNED_COMPRESSION = Knob(
    name="activation_compression",
    settings=COMPRESSION.settings,
    words="8-bit activations",
    family="8-bit activations",
    short="8-bit activations",
    group="activations",
    offered=_offered,
    bytes=_compressed_bytes,
    seconds=_compressed_seconds,
    rounds=True,
)
_PLANNED_OFFLOAD = Knob(
    name="activation_offload",
    settings=ACTIVATION_OFFLOAD.settings,
    words="activations in host memory",
    family="activations in host memory",
    short="activations on host",
    group="activations",
    offered=lambda spec, task, engine: _offered(spec, task, engine) and spec.preset.hardware.discrete_memory,
    bytes=_offloaded_bytes,
    moves_activations=True,
    on_host=True,
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
    planned: ClassVar = (_PLANNED_COMPRESSION, _PLANNED_OFFLOAD)

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
