"""The presets by name, and a preset for a device that has none."""

import functools
import logging
import os
import re
import shlex
from dataclasses import replace

from hf_memopt.compatibility.resolve import launched_strategy, sequence_parallel_size, world_size
from hf_memopt.compatibility.setup import check
from hf_memopt.engines.deepspeed import deepspeed_files
from hf_memopt.engines.mesh import is_mesh
from hf_memopt.errors import InputError, accepted, choose, respell
from hf_memopt.field_values import check_value
from hf_memopt.hardware import Hardware, get_hardware, list_hardware
from hf_memopt.hardware.allocator import configure_allocator
from hf_memopt.hardware.catalog import catalog
from hf_memopt.hardware.described import described_text
from hf_memopt.hardware.device_names import counted, names_meant
from hf_memopt.presets.build import build_preset, preset_names
from hf_memopt.presets.environment import PRECISION
from hf_memopt.presets.preset import METHODS, Preset, retrained, with_strategy

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)


def list_presets() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(preset_names())


@functools.cache
def strategies() -> list[str]:
    """The strategies that a preset can be asked for with, beside tpN and hsdpN: none, ddp, FSDP2's and the shipped
    DeepSpeed files."""
    return ["none", "ddp", "fsdp2", "fsdp2_offload_cpu", *(file.stem for file in deepspeed_files())]


def get_preset(name: str, method: str = "full", strategy: str | None = None, precision: str | None = None) -> Preset:
    """The settings for a kind of hardware, as this process was launched.

    Args:
        name: a name from list_presets(), "auto" for this machine's device (which imports torch), or any device that
            get_hardware() knows.
        method: full | lora | qlora.
        strategy: how several devices share the work, a name from strategies(). By default the one this process was
            launched with; outside a launcher the preset's own.
        precision: fp8 for matmuls in 8 bits, on GPUs with fp8 units; by default what this process was launched with
            if that is fp8, else the preset's own.

    Raises:
        InputError: an unknown name, or a combination that does not work.
    """
    launched = "fp8" if os.environ.get(PRECISION) == "fp8" else None
    processes = world_size() if world_size() > 1 else None
    preset = preset_by_name(name, method, strategy or launched_strategy(), precision or launched, processes)
    if (shared := sequence_parallel_size()) > 1:
        preset = replace(preset, sequence_parallel=shared, processes=max(shared, preset.processes))
    return preset


def preset_by_name(
    name: str,
    method: str = "full",
    strategy: str | None = None,
    precision: str | None = None,
    processes: int | None = None,
) -> Preset:
    """get_preset() for a job that is not this process's own: an estimate, a plan, exported files. The launcher's
    environment changes nothing.

    Args:
        processes: that tpN and hsdpN share a model over; by default the preset's own number.
    """
    check_value("preset", str, name)
    method, strategy = _read_names(method, strategy)
    name = (None if described_text(name) else preset_name(name)) or name
    if name == "auto":
        configure_allocator()  # looking at the card starts CUDA
        preset = _for_device(get_hardware("auto"), method)
    elif name in preset_names():
        preset = build_preset(name, method)
    else:
        preset = _for_device(_device(name), method)
    return _adapted(preset, strategy, precision, processes)


def plain_settings(device: Hardware, method: str = "full", strategy: str | None = None) -> Preset:
    """No preset: what TrainingArguments and from_pretrained do by themselves, on one device.

    LoRA and 4-bit weights are the presets'; neither has a default that fits every model.

    Args:
        method, strategy: as for get_preset().
    """
    method, strategy = _read_names(method, strategy)
    return Preset(
        name="",
        hardware=device,
        method=method,
        strategy=strategy or "none",
        processes=1,
        micro_batch_size=8,  # TrainingArguments' default
        effective_batch_size=8,
        seq_len=1024,  # TRL's default, SFTConfig.max_length; transformers has none
        reference_model="",
        meant_for="plain TrainingArguments",
        dtype="auto",
    )


def _read_names(method: str, strategy: str | None) -> tuple[str, str | None]:
    check_value("method", str, method)
    check_value("strategy", str | None, strategy)
    method, strategy = accepted("method", method, METHODS), strategy and respell("strategy", strategy, strategies())
    if strategy is not None:
        check_strategy(strategy)
    return method, strategy


def check_strategy(strategy: str) -> None:
    """Refuse what no engine is called.

    Raises:
        InputError: it names those that there are.
    """
    if strategy not in strategies() and not is_mesh(strategy):
        raise choose("strategy", strategy, [*strategies(), "tp8", "hsdp8"])


def _adapted(preset: Preset, strategy: str | None, precision: str | None, processes: int | None) -> Preset:
    """A preset under another strategy or precision.

    Raises:
        InputError: a combination that does not work.
    """
    if strategy and strategy != preset.strategy:
        if strategy == "none" and preset.processes > 1:
            raise InputError(
                f"preset {preset.name} is for {preset.processes} devices: strategy none cannot connect them"
            )
        preset = with_strategy(preset, strategy)
        if processes and preset.engine.mesh(processes):
            preset = replace(preset, processes=processes)
        check(preset.setup())
    if precision is not None:
        accepted("precision", precision, ("fp8",))
        from hf_memopt.presets.fp8 import in_fp8

        preset = in_fp8(preset)
    return preset


def preset_name(name: str) -> str | None:
    """The preset that a name stands for, whatever its case and separators: A100_80GB_X8, "8x A100 80GB"."""
    spelled = "_".join(re.split(r"[\s_-]+", name.strip().lower()))
    if spelled == "auto" or spelled in preset_names():
        return spelled
    card, count = counted(name, catalog())
    several = [f"{key}_x{count}" for key in names_meant(card, catalog())] if count > 1 else []
    return several[0] if len(several) == 1 and several[0] in preset_names() else None


def _device(name: str) -> Hardware:
    """The device of a name that no preset has.

    Raises:
        InputError: a name that several devices have, or none: then the closest preset is named.
    """
    if described_text(name):
        return get_hardware(name)
    card, devices = counted(name, catalog())
    if devices > 1:
        several = ", ".join(sorted(preset for preset in preset_names() if build_preset(preset, "full").processes > 1))
        raise InputError(
            f"{name} is several devices: the presets for several are {several}; for any others, ask "
            f"`hf-memopt plan MODEL --hardware {shlex.quote(name)}`"
        )
    try:
        return get_hardware(card)
    except InputError as error:
        if not str(error).startswith("unknown hardware"):
            raise
        unknown = choose("preset or hardware", name, [*preset_names(), *list_hardware(), "auto"])
        raise InputError(
            f"{unknown} `hf-memopt presets` lists them; another device can be described: see docs/plans.md."
        ) from error


def nearest_preset(device: Hardware) -> str:
    """The preset of a device, or of the largest known one of its kind that is not larger."""
    if device.name in preset_names():
        return device.name
    catalog = [get_hardware(name) for name in preset_names() if name in list_hardware()]
    # XPU has no preset yet; its cards take the settings of an NVIDIA card of their size.
    backend = "cuda" if device.backend == "xpu" else device.backend
    kind = [card for card in catalog if card.backend == backend]
    alike = [card for card in kind if card.native_bf16 == device.native_bf16] or kind
    fitting = [card for card in alike if card.memory <= device.memory * 1.02] or [
        min(alike, key=lambda card: card.memory)
    ]
    return max(fitting, key=lambda card: card.memory).name


def _for_device(device: Hardware, method: str) -> Preset:
    sizes = nearest_preset(device)
    if sizes != device.name:
        _warn_once("%s has no preset of its own: using %s's batch and length", device.label, sizes)
    return preset_for(device, method)


def preset_for(device: Hardware, method: str) -> Preset:
    """The device's own preset, or its own settings with the sizes of the nearest one."""
    sizes = nearest_preset(device)
    if sizes == device.name:
        return replace(build_preset(device.name, method), hardware=device)
    name = device.name if device.name in list_hardware() else sizes  # a name that get_preset() takes
    meant_for = f"{device.label}, with the batch, length and reference model of preset {sizes}."
    preset = replace(build_preset(sizes, method, device), name=name, meant_for=meant_for)
    return preset if device.backend != "xpu" else retrained(preset, tf32=None, torch_compile=None)
