"""--preset auto: a plan for this machine's free memory, the profile to start with, and safer ones."""

import logging
import sys
from dataclasses import dataclass, replace
from typing import Any

from hf_memopt.compatibility.resolve import launched_strategy, world_size
from hf_memopt.errors import InputError, StartAgain
from hf_memopt.estimator.overheads import context
from hf_memopt.hardware.host_memory import own_host_memory
from hf_memopt.hardware.measured import constant
from hf_memopt.job.spec import JobSpec
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
    """True if a recipe plans: one process, no launcher. A launcher has already said how several share the work."""
    return preset_name == "auto" and world_size() == 1 and launched_strategy() is None


def plan_here(config, preset: Preset, profile: str, training: dict[str, Any], **settings) -> Planned:
    """The settings of a profile, for the memory that is free now.

    Args:
        config: the model's.
        preset: of this machine's device; the search starts from its settings.
        profile: safe, balanced, aggressive or maximum.
        training: TrainingArguments fields that stay, with `effective_batch_size` where the user set it.
        settings: further fields of JobSpec.

    Raises:
        InputError: nothing fits.
    """
    from hf_memopt.planner.plan import plan_job

    # The preset's hardware says whether the CPU is used.
    training = {name: value for name, value in training.items() if name != "use_cpu"}
    memory = usable_memory(preset.hardware)
    spec = JobSpec(
        model=config,
        hardware=preset,
        method=preset.method,
        effective_batch_size=training.pop("effective_batch_size", None),
        memory=memory,
        training=training,
        host_memory=own_host_memory(1) if preset.hardware.discrete_memory else None,
        **settings,
    )
    plan = plan_job(spec, lambda text: print(text, file=sys.stderr))
    if not plan.profiles:
        changes = "; ".join(plan.nearest) or "a smaller model"
        raise InputError(
            f"nothing fits the {gib(memory)} that are free here: {gib(plan.missing_bytes)} missing. What would fit: "
            f"{changes}. A named --preset runs without a plan"
        )
    return _pick_profile(plan.profiles, profile, memory)


def _pick_profile(profiles, name: str, memory: int) -> Planned:
    """The profile of that name, or the safest one, and the next safer one with other settings."""
    names = [profile.name for profile in profiles]
    place = names.index(name) if name in names else 0
    chosen = profiles[place]
    safer = [profile.name for profile in profiles[:place] if profile.choice != chosen.choice]
    return Planned(
        preset=chosen.preset,
        memory_args=replace(chosen.memory_args, probe_worst_batch=True),
        fields={
            "per_device_train_batch_size": chosen.choice.micro_batch,
            "gradient_accumulation_steps": chosen.choice.accumulation,
        },
        summary=f"{chosen.name}: {chosen.summary}; {gib(chosen.estimate.device_bytes)} of {gib(memory)} free",
        safer=safer[-1] if safer else None,
    )


def usable_memory(device) -> int:
    """Bytes that a job may use on this machine's device: what is free, less a margin.

    The context that this process already has on the device is added back, because the estimate counts it too.
    """
    from hf_memopt.monitor.readers import Reader

    reading = Reader("cpu" if device.backend == "cpu" else None).read()
    on_host = device.backend == "cpu" or device.unified_memory
    free = min(reading.free, reading.host_available) if on_host else reading.free + context(device)
    return max(1, min(free, device.memory) - int(constant("free_memory_margin_bytes", device).value))


def step_down(argv: list[str], safer: str | None, samples_at_once: int, micro_batch: int) -> None:
    """Start again with the next safer profile, after the largest batch did not fit at once.

    Raises:
        StartAgain: with the arguments to start with.
    """
    if safer is None:
        return
    logger.warning(
        "the largest batch ran in chunks of %d of %d samples: starting again with the profile %s",
        samples_at_once,
        micro_batch,
        safer,
    )
    raise StartAgain([*argv, "--profile", safer], free_memory)
