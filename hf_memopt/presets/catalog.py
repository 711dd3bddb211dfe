"""The presets by name, and a preset for a device that has none."""

import logging
import os
from dataclasses import replace

from hf_memopt.compatibility.launch import launched_strategy, sequence_parallel_size, world_size
from hf_memopt.compatibility.mesh import is_mesh
from hf_memopt.compatibility.setup import check
from hf_memopt.errors import InputError, choose
from hf_memopt.hardware import Hardware, get_hardware, list_hardware
from hf_memopt.hardware.allocator import configure_allocator
from hf_memopt.presets.accelerate_config import deepspeed_files
from hf_memopt.presets.build import build_preset, preset_names
from hf_memopt.presets.environment import PRECISION
from hf_memopt.presets.preset import METHODS, Preset, retrained, with_strategy

logger = logging.getLogger(__name__)


def list_presets() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(preset_names())


def strategies() -> list[str]:
    """The strategies that a preset can be asked for with, beside tpN and hsdpN: none, ddp, fsdp2 and the shipped
    DeepSpeed files."""
    return ["none", "ddp", "fsdp2", *(file.stem for file in deepspeed_files())]


def get_preset(name: str, method: str = "full", strategy: str | None = None, precision: str | None = None) -> Preset:
    """The settings for a kind of hardware.

    Args:
        name: a name from list_presets(), or "auto" for this machine's device (which imports torch).
        method: full | lora | qlora.
        strategy: how several devices share the work, a name from strategies(). By default the one this process was
            launched with; outside a launcher the preset's own.
        precision: fp8 for matmuls in 8 bits, on GPUs with fp8 units; by default what this process was launched with
            if that is fp8, else the preset's own.

    Raises:
        InputError: an unknown name, or a combination that does not work.
    """
    if method not in METHODS:
        raise choose("method", method, METHODS)
    if strategy is not None and strategy not in strategies() and not is_mesh(strategy):
        raise choose("strategy", strategy, [*strategies(), "tp8", "hsdp8"])
    if name == "auto":
        configure_allocator()  # looking at the card starts CUDA
        preset = _for_device(get_hardware("auto"), method)
    elif name in preset_names():
        preset = build_preset(name, method)
    else:
        raise choose("preset", name, [*preset_names(), "auto"])
    strategy = strategy or launched_strategy()
    if strategy and strategy != preset.strategy:
        if strategy == "none" and preset.processes > 1:
            raise InputError(f"preset {name} is for {preset.processes} devices: strategy none cannot connect them")
        preset = with_strategy(preset, strategy)
        if is_mesh(strategy) and world_size() > 1:
            preset = replace(preset, processes=world_size())
        check(preset.setup())
    if (shared := sequence_parallel_size()) > 1:
        preset = replace(preset, sequence_parallel=shared)
    if precision not in (None, "fp8"):
        raise choose("precision", precision, ("fp8",))
    if precision or os.environ.get(PRECISION) == "fp8":
        from hf_memopt.presets.fp8 import in_fp8

        preset = in_fp8(preset)
    return preset


def _for_device(device: Hardware, method: str) -> Preset:
    """The device's own preset, or the one of the largest known device of its kind that is not larger than it."""
    if device.name in preset_names():
        return replace(build_preset(device.name, method), hardware=device)
    catalog = [get_hardware(name) for name in list_hardware() if name in preset_names()]
    # XPU has no preset yet; its cards speak the same vocabulary as an NVIDIA card of their size.
    backend = "cuda" if device.backend == "xpu" else device.backend
    kind = [known for known in catalog if known.backend == backend]
    alike = [known for known in kind if known.native_bf16 == device.native_bf16] or kind
    fitting = [known for known in alike if known.memory <= device.memory * 1.02] or [
        min(alike, key=lambda known: known.memory)
    ]
    chosen = max(fitting, key=lambda known: known.memory)
    logger.warning("%s has no preset of its own: using %s", device.label, chosen.name)
    preset = replace(build_preset(chosen.name, method), hardware=device)
    return preset if device.backend != "xpu" else retrained(preset, tf32=None, torch_compile=None)
