"""--preset auto: a plan for this machine's free memory, the profile to start with, and safer ones."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hf_memopt.compatibility.launch import launched_strategy, world_size
from hf_memopt.errors import InputError, StartAgain
from hf_memopt.estimator.overheads import context
from hf_memopt.hardware.measured import constant
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.oom.classify import free_memory
from hf_memopt.presets import Preset
from hf_memopt.units import gib

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """The profile that a recipe runs.

    Attributes:
        preset, memory_args: the profile's.
        fields: TrainingArguments fields of its batch.
        summary: the profile's settings and predicted memory, in a line.
        safer: the next safer profile with other settings; None for the safest.
    """

    preset: Preset
    memory_args: MemoryArguments
    fields: dict[str, Any]
    summary: str
    safer: str | None


def plans_here(preset_name: str) -> bool:
    """Whether a recipe plans: one process, no launcher. A launcher has already said how several share the work."""
    return preset_name == "auto" and world_size() == 1 and launched_strategy() is None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a recipe asks to be planned.

    Attributes:
        config: the model's.
        preset: of this machine's device; the search starts from its settings.
        profile: safe, balanced, aggressive or maximum.
        training: TrainingArguments fields that stay, with `effective_batch_size` where the user set it.
        lora: LoraConfig fields.
        quantization: makes the BitsAndBytesConfig of a preset; None for the preset's own.
        layout: further arguments of the estimator: padded, packed, attn_implementation, video, frozen, …
    """

    config: Any
    preset: Preset
    seq_len: int
    profile: str
    training: dict[str, Any]
    lora: dict[str, Any]
    quantization: Callable[[Preset], Any] | None
    memory_args: MemoryArguments
    layout: dict[str, Any] = field(default_factory=dict)


def plan_here(request: PlanRequest) -> Planned:
    """The settings of a profile, for the memory that is free now.

    Raises:
        InputError: nothing fits.
    """
    from hf_memopt.planner.plan import plan

    preset, training = request.preset, dict(request.training)
    training.pop("use_cpu", None)  # the preset's hardware says so
    memory = free_memory_of(preset.hardware)
    made = plan(
        request.config,
        preset,
        training.pop("effective_batch_size", None),
        request.seq_len,
        preset.method,
        memory=memory,
        training=training,
        lora=request.lora,
        memory_args=request.memory_args,
        quantization=request.quantization,
        host_memory=_host_memory(preset.hardware),
        say=lambda text: print(text, file=sys.stderr),
        **request.layout,
    )
    if not made.profiles:
        changes = "; ".join(made.nearest) or "a smaller model"
        raise InputError(
            f"nothing fits the {gib(memory)} that are free here: {gib(made.missing_bytes)} missing. What would fit: "
            f"{changes}. A named --preset runs without a plan"
        )
    return _pick_profile(made.profiles, request.profile, memory)


def _pick_profile(profiles, name: str, memory: int) -> Planned:
    """The profile of that name, or the safest one, and the next safer one with other settings."""
    names = [profile.name for profile in profiles]
    place = names.index(name) if name in names else 0
    chosen = profiles[place]
    safer = [profile.name for profile in profiles[:place] if profile.choice != chosen.choice]
    batch = {
        "per_device_train_batch_size": chosen.choice.micro_batch,
        "gradient_accumulation_steps": chosen.choice.accumulation,
    }
    return Planned(
        preset=chosen.preset,
        memory_args=replace(chosen.memory_args, probe_worst_batch=True),
        fields=batch,
        summary=f"{chosen.name}: {chosen.summary}; {gib(chosen.estimate.device_bytes)} of {gib(memory)} free",
        safer=safer[-1] if safer else None,
    )


def _host_memory(device) -> int | None:
    """Bytes free on the host, beside a device with memory of its own."""
    import psutil

    return psutil.virtual_memory().available if device.discrete_memory else None


def free_memory_of(device) -> int:
    """Bytes that a job may use on this machine's device: what is free, less a margin.

    The context that this process already has on the device is added back, because the estimate counts it too.
    """
    from hf_memopt.monitor.readers import Reader

    reading = Reader("cpu" if device.backend == "cpu" else None).read()
    if device.backend == "cpu" or device.unified_memory:
        free = min(reading.free, reading.host_available)
    else:
        free = reading.free + context(device)
    return max(1, min(free, device.memory) - int(constant("free_memory_margin_bytes", device).value))


def step_down(argv: list[str], safer: str | None, samples_at_once: int, asked: int) -> None:
    """Start again with the next safer profile, after the largest batch did not fit at once.

    Raises:
        StartAgain: with the arguments to start with.
    """
    if safer is None:
        return
    logger.warning(
        "the largest batch ran in chunks of %d of %d samples: starting again with the profile %s",
        samples_at_once,
        asked,
        safer,
    )
    raise StartAgain([*argv, "--profile", safer], free_memory)
