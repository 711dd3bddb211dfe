"""--preset auto: a plan for this machine's free memory, the rung to begin on, and the way down."""

import logging
import sys
from dataclasses import dataclass, replace
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
    """The rung that a recipe runs.

    Attributes:
        preset, memory_args: the rung's.
        fields: TrainingArguments fields of its batch.
        summary: the rung in a sentence.
        safer: the next rung below with other settings; None on the lowest.
    """

    preset: Preset
    memory_args: MemoryArguments
    fields: dict[str, Any]
    summary: str
    safer: str | None


def plans_here(preset_name: str) -> bool:
    """Whether a recipe plans: one process on whatever this machine has. Several were told how to share the work."""
    return preset_name == "auto" and world_size() == 1 and launched_strategy() is None


def plan_here(
    config,
    preset: Preset,
    seq_len: int,
    rung: str,
    training: dict[str, Any],
    lora: dict[str, Any],
    quantization,
    memory_args: MemoryArguments,
    **layout,
) -> Planned:
    """The settings of a rung, for the memory that is free now.

    Args:
        config: the model's.
        preset: of this machine's device; what it sets is where the search begins.
        training: TrainingArguments fields that stay, with `effective_batch_size` where it was given.
        quantization: gives the BitsAndBytesConfig of a preset; None for the preset's own.
        layout: padded, packed, attn_implementation.

    Raises:
        InputError: nothing fits.
    """
    from hf_memopt.planner.plan import plan

    memory = free_memory_of(preset.hardware)
    fields = dict(training)
    effective = fields.pop("effective_batch_size", None)
    found = plan(
        config,
        preset,
        effective,
        seq_len,
        preset.method,
        memory=memory,
        training=fields,
        lora=lora,
        memory_args=memory_args,
        quantization=quantization,
        host_memory=_host_memory(preset.hardware),
        say=lambda text: print(text, file=sys.stderr),
        **layout,
    )
    if not found.ladder:
        changes = "; ".join(found.nearest) or "a smaller model"
        raise InputError(
            f"nothing fits the {gib(memory)} that are free here, {gib(found.missing_bytes)} are missing; what would: "
            f"{changes}. Another --preset than auto goes ahead all the same"
        )
    names = [one.name for one in found.ladder]
    place = names.index(rung) if rung in names else 0
    chosen = found.ladder[place]
    below = [one.name for one in found.ladder[:place] if one.choice != chosen.choice]
    needs, usable = gib(chosen.estimate.device_bytes), gib(memory)
    batch = {
        "per_device_train_batch_size": chosen.choice.micro_batch,
        "gradient_accumulation_steps": chosen.choice.accumulation,
    }
    probed = replace(chosen.memory_args, probe_worst_batch=True)
    return Planned(
        chosen.preset,
        probed,
        batch,
        f"{chosen.name}: {chosen.summary}; {needs} of {usable} free",
        below[-1] if below else None,
    )


def _host_memory(device) -> int | None:
    """Bytes free on the host, beside a device with memory of its own."""
    import psutil

    return psutil.virtual_memory().available if device.memory_apart else None


def free_memory_of(device) -> int:
    """Bytes that a job may use on this machine's device: what is free, less a margin.

    The estimate counts the context that this process has on the device, which is not free any more.
    """
    from hf_memopt.monitor.readers import Reader

    reading = Reader("cpu" if device.backend == "cpu" else None).read()
    if device.backend == "cpu" or device.unified_memory:
        free = min(reading.free, reading.host_available)
    else:
        free = reading.free + context(device)
    return max(1, min(free, device.memory) - int(constant("free_memory_margin_bytes", device).value))


def step_down(argv: list[str], safer: str | None, samples_at_once: int, asked: int) -> None:
    """Begin again one rung lower, after the largest batch did not fit in one piece.

    Raises:
        StartAgain: with the arguments to begin with.
    """
    if safer is None:
        return
    logger.warning(
        "the largest batch ran in pieces of %d of %d samples: starting again on the rung %s",
        samples_at_once,
        asked,
        safer,
    )
    raise StartAgain([*argv, "--rung", safer], free_memory)
