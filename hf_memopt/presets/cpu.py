"""The CPU: to try a recipe, and for tests."""

from hf_memopt.presets.base import BUILTIN, several, single
from hf_memopt.presets.preset import Preset


def cpu(method: str) -> Preset:
    """CPU. The built-in small model at 256 tokens, with any method.

    Everything in fp32, nothing recomputed: on a CPU compute is what is short.
    """
    sizes = dict.fromkeys(("full", "lora", "qlora"), (4, 2, 256, BUILTIN))
    return single(cpu, method, sizes)


def cpu_x2(method: str) -> Preset:
    """Two CPU processes, the same built-in model: shows DDP and DeepSpeed without a GPU.

    Trades nothing worth having: it is for trying an engine's configuration before renting the cluster.
    """
    sizes = dict.fromkeys(("full", "lora", "qlora"), (2, 2, 256, BUILTIN))
    return several(cpu(method), cpu_x2, 2, "ddp", sizes)
