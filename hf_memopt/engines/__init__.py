"""Engines: how the processes of a job share a model, a file each. Elsewhere an engine is asked for its properties."""

import functools

from hf_memopt.engines.deepspeed import DeepSpeed
from hf_memopt.engines.engine import DDP, NO_ENGINE, Engine
from hf_memopt.engines.fsdp import FSDP
from hf_memopt.engines.mesh import MeshEngine, is_mesh

__all__ = ["DDP", "FSDP", "NO_ENGINE", "DeepSpeed", "Engine", "MeshEngine", "engine_named", "engine_of_table"]

_ENGINES = {"none": NO_ENGINE, "ddp": DDP()}
for _offloads in (False, True):  # as presets.accelerate_config.FSDP2
    _engine = FSDP.of_settings({"activation_checkpointing": True, "cpu_offload": _offloads}, "")
    _ENGINES[_engine.strategy] = _engine


@functools.cache
def engine_named(strategy: str) -> Engine:
    """The engine of a strategy, as presets set it up."""
    return _ENGINES.get(strategy) or (MeshEngine(strategy) if is_mesh(strategy) else DeepSpeed(strategy))


def engine_of_table(name: str) -> Engine:
    """The engine of a name in the compatibility table (Engine.name), where fsdp1, hsdp and tp are no strategies."""
    named = {"fsdp1": FSDP(fsdp_version=1), "hsdp": MeshEngine("hsdp1"), "tp": MeshEngine("tp1")}
    return named.get(name) or engine_named(name)
