"""The base of all engines: one process without an engine; DDP differs in little."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hf_memopt.errors import as_input_error
from hf_memopt.files import parse_json, read_json


class Exchange(NamedTuple):
    """Bytes of which every process has a share before and all after, or the other way round.

    Attributes:
        per_step: once a step, not in every micro-batch.
        in_box: among the devices of each box.
    """

    size: float
    per_step: bool = False
    in_box: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine and those of its settings that decide what works with it and what it takes.

    Attributes:
        strategy: none | ddp | fsdp2 | tpN, hsdpN, tpN_hsdpM | a name like those in accelerate_configs/deepspeed.
        source: the setting that asks for it, as a refusal names it.
        tp_size: processes that share every layer, by accelerate's ParallelismConfig.
    """

    strategy: str = "none"
    source: str = ""
    tp_size: int = 1

    distributed_type: ClassVar[str] = "NO"  # accelerate's
    beside: ClassVar[tuple[str, ...]] = ("fsdp", "deepspeed")  # fields that may configure a preset's engine
    package: ClassVar[str | None] = None  # that it needs beside torch, transformers and accelerate
    replicates: ClassVar[bool] = False  # several processes hold the model whole
    by_transformers: ClassVar[bool] = False  # from_pretrained shards the model (DistributedConfig)
    dtensor: ClassVar[bool] = False  # weights are DTensors
    master_weights: ClassVar[bool] = False  # it trains fp32 weights, whatever is loaded
    flat_buffers: ClassVar[bool] = False  # these and all gradients are in flat buffers, beside the model's tensors
    accelerator_only: ClassVar[bool] = False  # accelerate does not start it on a CPU
    deepspeed: ClassVar[Mapping[str, Any] | None] = None  # DeepSpeed's configuration
    zero_stage: ClassVar[int] = 0  # DeepSpeed's
    fsdp_version: ClassVar[int | None] = None
    offload: ClassVar[str] = "none"  # where the optimizer's states are: none, cpu or nvme
    checkpointing: ClassVar[bool] = False  # it checkpoints activations itself (fsdp_activation_checkpointing)
    reshards: ClassVar[bool] = True  # FSDP frees gathered weights after forward (fsdp_reshard_after_forward)
    gathers_to_generate: ClassVar[str] = ""  # by what TRL gathers weights to generate (trl 1.16, models/utils.py)
    live_weights: ClassVar[float | None] = None  # elements that may stay gathered, however deep the model is
    gradient_bucket: ClassVar[float | None] = None  # elements of whole gradients that wait to be reduced
    step_group: ClassVar[float | None] = None  # elements that the optimizer steps over at once, on each process

    offloads = property(lambda self: self.offload != "none")
    offloads_alone = property(lambda self: self.offloads and not self.fsdp_version)  # one process suffices
    # Whether each process has a part of them; tensor parallelism divides all three.
    shards_weights = property(lambda self: not self.plain)
    shards_gradients = property(lambda self: self.shards_weights)
    shards_states = property(lambda self: self.shards_gradients)

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
        return self.strategy

    @property
    def plain(self) -> bool:
        """True if weights, gradients and states are whole, and held by the model and the optimizer alone."""
        return self.tp_size == 1

    @property
    def alone(self) -> bool:
        """True of one process without an engine."""
        return self.plain and not self.replicates

    @property
    def fewest_layers(self) -> int:
        """Layers of a traced shallow model: first, last and one between; a second for engines that prefetch."""
        return 3 if self.plain else 4

    @property
    def unlike_layers(self) -> int:
        """The first layers, in whose backward pass less is gathered ahead than in that of those above."""
        return 0 if self.plain else 2

    def setup(self) -> dict[str, Any]:
        """The fields of a compatibility Setup that it decides."""
        return {
            "strategy": self.name,
            "offload": self.offload,
            "engine_checkpointing": self.checkpointing,
            "engine_optimizer": "optimizer" in (self.deepspeed or {}),
        }

    def mesh(self, world_size: int):
        """The mesh.Mesh by which processes share a model that transformers shards; None under other engines."""

    def shipped_config(self) -> dict[str, Any] | None:
        """The content of accelerate_configs/deepspeed/<strategy>.json; None without DeepSpeed."""

    def fields(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """The TrainingArguments fields that start the engine in place of the one that others ask for."""
        return {}

    def check(self, fields: Mapping[str, Any], world_size: int) -> None:
        """Raise an InputError for settings that contradict TrainingArguments, or that a trace would leave out."""

    def traceable(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields whose job is the same in memory and can be traced."""
        return fields

    def peak_rank(self, world_size: int) -> int:
        """The process that needs the most memory: the first gets FSDP2's remainder of what does not divide evenly."""
        return 0

    def rank_bytes(self, ranks: int, loaded: int, trained: int, gradients: float, gathered: float) -> dict[str, float]:
        """The bytes that one rank holds by kind of memory, by arithmetic; empty where they are those of one process.

        Args:
            loaded, gradients, gathered: bytes of all weights, of all gradients, and of the weights that are whole at a
                time: the embeddings, which stay until backward, a layer and the next.
            trained: number of weights that are trained.
        """
        return {}

    def host_bytes(self, ranks: int, loaded: float, trained: int) -> float:
        """The bytes that one rank of an engine that offloads holds in host memory: weights in 16 bits, and fp32
        weights, states and gradients."""
        return (loaded + 16 * trained) / ranks

    def exchanged(self, weights: float, gradients: float) -> list[Exchange]:
        """What passes between devices.

        Args:
            weights, gradients: bytes of all of them, in the types in which they are sent.
        """
        return [Exchange(gradients, per_step=True)] * 2  # reduced to shares, and these gathered


NO_ENGINE = Engine()


@dataclass(frozen=True)
class DDP(Engine):
    """Whole models that exchange gradients."""

    strategy: str = "ddp"

    distributed_type: ClassVar = "MULTI_GPU"
    beside: ClassVar = ("deepspeed",)
    replicates: ClassVar = True


def is_true(value: object) -> bool:
    """A switch, written as a bool or as YAML, JSON and environment variables write one (accelerate's str_to_bool)."""
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


def is_inline_json(value: Any) -> bool:
    """True if transformers would read a field as JSON instead of as a path."""
    return isinstance(value, str) and value.startswith("{")


def read_settings(value: Mapping[str, Any] | str | Path, field: str) -> Mapping[str, Any]:
    """A field of TrainingArguments that may be a dict, its JSON (as on a command line) or a file's path."""
    if isinstance(value, Mapping):
        return value
    if not is_inline_json(value):
        return read_json(value)
    with as_input_error(field, ValueError):
        return parse_json(value)
