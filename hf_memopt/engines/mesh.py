"""Tensor parallelism, sharding and replicas by transformers' own DistributedConfig: strategies tp8, hsdp8, tp8_hsdp2.

tpN cuts every layer's matrices over N devices, which share a batch; what processes are beyond that shard the rest of
the way (FSDP2). hsdpN shards over N devices, and as many replicas as there are processes for: only gradients pass
between them.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

from hf_memopt.engines.engine import Engine
from hf_memopt.errors import InputError

_STRATEGY = re.compile(r"(?=.)(?:tp(?P<tp>[1-9]\d*))?(?:(?(tp)_)hsdp(?P<fsdp>[1-9]\d*))?")


@dataclass(frozen=True)
class Mesh:
    """The processes that share a model: their number is the product.

    Attributes:
        tp_size, fsdp_size, dp_replicate_size: as in transformers.distributed.DistributedConfig.
    """

    tp_size: int = 1
    fsdp_size: int = 1
    dp_replicate_size: int = 1

    @property
    def batches(self) -> int:
        """Processes that take a batch of their own."""
        return self.fsdp_size * self.dp_replicate_size

    @property
    def strategy(self) -> str | None:
        """The strategy's name; None of one device."""
        return mesh_strategy(*(size if size > 1 else None for size in (self.tp_size, self.fsdp_size)))


@dataclass(frozen=True)
class MeshEngine(Engine):
    strategy: str = "hsdp1"

    family: ClassVar = "mesh"
    plain: ClassVar = False
    distributed_type: ClassVar = "MULTI_GPU"  # accelerate starts the processes, and no more
    beside: ClassVar = ()
    by_transformers: ClassVar = True
    dtensor: ClassVar = True
    accelerator_only: ClassVar = True
    gathers_to_generate: ClassVar = "sharding by transformers"

    @property
    def name(self) -> str:
        return "tp" if self.tp_size > 1 or self.strategy.startswith("tp") else "hsdp"

    def mesh(self, world_size):
        match = _STRATEGY.fullmatch(self.strategy)
        tp, fsdp = int(match["tp"] or 1), int(match["fsdp"] or 0)
        if world_size % (tp * (fsdp or 1)):
            sizes = (("tp_size", match["tp"]), ("fsdp_size", fsdp))
            product = " × ".join(f"{name}={size}" for name, size in sizes if size)
            raise InputError(f"{product} does not divide the {world_size} processes: choose sizes whose product does")
        remaining = world_size // tp
        return Mesh(tp, fsdp, remaining // fsdp) if fsdp else Mesh(tp, remaining, 1)


def is_mesh(strategy: str | None) -> bool:
    """True if a strategy is of this kind."""
    return _STRATEGY.fullmatch(strategy or "") is not None


def mesh_strategy(tp_size: int | None, fsdp_size: int | None) -> str | None:
    """The strategy's name for a recipe's arguments; None where neither was given."""
    return "_".join([f"tp{tp_size}"] * bool(tp_size) + [f"hsdp{fsdp_size}"] * bool(fsdp_size)) or None


def mesh_words(strategy: str) -> list[str]:
    """The recipe's arguments that ask for a strategy; none for those that a launcher knows."""
    match = _STRATEGY.fullmatch(strategy)
    sizes = {"--tp_size": match["tp"], "--fsdp_size": match["fsdp"]} if match else {}
    return [word for name, size in sizes.items() if size for word in (name, size)]
