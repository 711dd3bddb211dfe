"""What engines have in common. The base is one process without an engine; DDP differs in little."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hf_memopt.errors import as_input_error
from hf_memopt.files import read_json


@dataclass(frozen=True)
class Sizes:
    """What a rank's share is computed from: bytes on one device, and numbers.

    Attributes:
        ranks: processes.
        loaded: bytes of all weights.
        trained: number of weights that are trained.
        gradients: bytes of their gradients.
        outside_layers: number of weights outside the layers.
    """

    ranks: int
    loaded: int
    trained: int
    gradients: float
    outside_layers: int
    layers: int


@dataclass(frozen=True)
class Engine:
    """An engine and those of its settings that decide what works with it and what it takes.

    Attributes:
        strategy: none | ddp | fsdp2 | tpN, hsdpN, tpN_hsdpM | a name like those in accelerate_configs/deepspeed.
        source: the setting that asks for it, as a refusal names it.
        tp_size: processes that share every layer, by accelerate's ParallelismConfig.
        distributed_type: accelerate's.
        beside: fields of TrainingArguments that may configure the engine of a preset with this strategy.
        package: that it needs beside torch, transformers and accelerate.
        replicates: several processes hold the model whole.
        by_transformers: from_pretrained shards the model (DistributedConfig).
        dtensor: weights are DTensors.
        master_weights: it trains fp32 weights, whatever is loaded.
        flat_buffers: these and all gradients are in flat buffers, beside the model's own tensors.
        accelerator_only: accelerate does not start it on a CPU.
        splits_sequences: it can divide each sequence between processes (Ulysses).
        runs_fp8: accelerate can compute in fp8 under it.
        fewest_layers: of a shallow model that is traced: first, last and one between; a second for engines that
            prefetch.
        traced_steps: the first creates the optimizer's states, the second is like every further one. Without an
            engine these are created from empty gradients (segments), without the first forward and backward.
        deepspeed: DeepSpeed's configuration; None under other engines.
        zero_stage: DeepSpeed's; 0 under other engines.
        fsdp_version: 1 or 2; None without FSDP.
        offload: where the optimizer's states are: none, cpu or nvme.
        checkpointing: it checkpoints activations itself (fsdp_activation_checkpointing).
        reshards: FSDP frees a layer's gathered weights after its forward pass (fsdp_reshard_after_forward).
        gathers_to_generate: by what TRL gathers weights before it generates (trl 1.16, models/utils.py); "" if not.
        live_weights: elements that may stay gathered, however deep the model is.
        step_group: elements that the optimizer steps over at once, on each process.
    """

    strategy: str = "none"
    source: str = ""
    tp_size: int = 1

    distributed_type: ClassVar[str] = "NO"
    beside: ClassVar[tuple[str, ...]] = ("fsdp", "deepspeed")
    package: ClassVar[str | None] = None
    replicates: ClassVar[bool] = False
    by_transformers: ClassVar[bool] = False
    dtensor: ClassVar[bool] = False
    master_weights: ClassVar[bool] = False
    flat_buffers: ClassVar[bool] = False
    accelerator_only: ClassVar[bool] = False
    splits_sequences: ClassVar[bool] = False
    runs_fp8: ClassVar[bool] = True
    fewest_layers: ClassVar[int] = 3
    traced_steps: ClassVar[int] = 1
    deepspeed: ClassVar[Mapping[str, Any] | None] = None
    zero_stage: ClassVar[int] = 0
    fsdp_version: ClassVar[int | None] = None
    offload: ClassVar[str] = "none"
    checkpointing: ClassVar[bool] = False
    reshards: ClassVar[bool] = True
    gathers_to_generate: ClassVar[str] = ""
    live_weights: ClassVar[float | None] = None
    step_group: ClassVar[float | None] = None

    @property
    def family(self) -> str:
        """none, ddp, fsdp1, fsdp2, mesh or deepspeed."""
        return self.strategy

    @property
    def name(self) -> str:
        """The engine in the terms of the compatibility table."""
        # FSDP2 may shard what tensor parallelism leaves; the table's rows are the latter's.
        return "tp" if self.tp_size > 1 else self.family

    @property
    def label(self) -> str:
        """The engine as a refusal names it."""
        return self.family

    @property
    def plain(self) -> bool:
        """True if weights, gradients and states are whole, and held by the model and the optimizer alone."""
        return self.tp_size == 1

    @property
    def alone(self) -> bool:
        """True of one process without an engine."""
        return self.plain and not self.replicates

    @property
    def shards_weights(self) -> bool:
        return not self.plain

    @property
    def shards_gradients(self) -> bool:
        return self.shards_weights

    @property
    def shards_states(self) -> bool:
        return self.shards_gradients

    def setup(self) -> dict[str, Any]:
        """The fields of a compatibility Setup that it decides."""
        return {
            "strategy": self.name,
            "offload": self.offload,
            "engine_checkpointing": self.checkpointing,
            "engine_optimizer": "optimizer" in (self.deepspeed or {}),
        }

    def mesh(self, world_size: int):
        """How processes share a model that transformers shards, a mesh.Mesh; None under other engines.

        Raises:
            InputError: the processes cannot be shared so.
        """

    def shipped_config(self) -> dict[str, Any] | None:
        """What accelerate_configs/deepspeed/<strategy>.json holds; None without DeepSpeed."""

    def fields(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """The TrainingArguments fields that start the engine in place of the one that others ask for."""
        return {}

    def check(self, fields: Mapping[str, Any], world_size: int) -> None:
        """Refuse its settings that contradict TrainingArguments, or that a trace would leave out.

        Raises:
            InputError: the setting, and what to use instead.
        """

    def traceable(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields whose job is the same in memory and can be traced."""
        return fields

    def peak_rank(self, world_size: int) -> int:
        """The process that needs the most memory: all need as much as the first, which gets FSDP2's remainder of what
        does not divide evenly."""
        return 0

    def rank_bytes(self, sizes: Sizes) -> dict[str, float]:
        """What one rank holds by kind of memory, by arithmetic; empty where it is what one process alone holds."""
        return {}

    def exchanged(self, weights: float, gradients: float) -> tuple[float, float]:
        """Bytes that pass between devices in a micro-batch and once a step.

        Args:
            weights, gradients: bytes of all of them, in 16 bits.
        """
        return 0.0, 2 * gradients  # reduced and spread


NO_ENGINE = Engine()


@dataclass(frozen=True)
class DDP(Engine):
    """Whole models that exchange gradients."""

    strategy: str = "ddp"

    distributed_type: ClassVar = "MULTI_GPU"
    beside: ClassVar = ("deepspeed",)
    replicates: ClassVar = True

    def exchanged(self, weights, gradients):
        return 0.0, 2 * 2 * gradients  # fp32


def is_true(value: object) -> bool:
    """A switch, written as a bool or as YAML, JSON and environment variables write one (accelerate's str_to_bool)."""
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


def given_as_json(given: Any) -> bool:
    """Whether transformers would read a field as JSON instead of as a path."""
    return isinstance(given, str) and given.startswith("{")


def read_settings(given: Mapping[str, Any] | str | Path, field: str) -> Mapping[str, Any]:
    """A field of TrainingArguments that may be a dict, its JSON (as on a command line) or a file's path."""
    if isinstance(given, Mapping):
        return given
    if not given_as_json(given):
        return read_json(given)
    with as_input_error(field, ValueError):
        return json.loads(given)
