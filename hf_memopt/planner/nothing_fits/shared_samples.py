"""Samples whose tokens several devices share (DeepSpeed's Ulysses), where a device has no room for a whole one."""

import shlex
from dataclasses import dataclass, replace

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.architectures import hub_id
from hf_memopt.estimator.job_checks import divides_heads
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.job.spec import JobSpec
from hf_memopt.packages import is_installed
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.launch import has_recipe, recipe_name
from hf_memopt.presets import Preset, list_presets, preset_by_name
from hf_memopt.units import gib

_STRATEGIES = ("zero3", "zero3_offload_cpu")  # the second where the first does not fit


@dataclass(frozen=True)
class SharedSamples:
    """A job whose samples devices share, beside a plan whose devices have whole ones.

    Attributes:
        text: what it needs, and the command that writes it.
        fits: None where it was not predicted.
        device_bytes: of each device.
    """

    text: str
    fits: bool | None = None
    device_bytes: int = 0


def shared_samples(spec: JobSpec, choice: Choice | None) -> SharedSamples | None:
    """The job that shares samples among devices, where one sample is what fills a device or exceeds it.

    Args:
        spec: settled, of a plan.
        choice: the plan's usual one; None where nothing fits.
    """
    preset = spec.preset
    moved = choice is None or (choice.micro_batch == 1 and choice.moves_activations)
    if (
        not moved
        or (spec.seq_len or 0) <= preset.seq_len
        or preset.strategy != "none"
        or not is_installed("deepspeed")
    ):
        return None
    runs = has_recipe(spec) and recipe_name(spec) in ("pretrain", "sft") and preset.method != "qlora"
    named, devices = _named_box(preset), _most_devices(spec)
    if not runs or named is None or devices == 1:
        return None
    for strategy in _STRATEGIES:
        command = (
            f"hf-memopt export {named} my-run --strategy {strategy} --sequence-parallel {devices} --method "
            f"{preset.method} --recipe {recipe_name(spec)} -- --model_name_or_path {shlex.quote(hub_id(spec.model))} "
            f"--max_length {spec.seq_len} --effective_batch_size {spec.effective_batch_size} "
            "--per_device_train_batch_size 1"
        )
        estimate = None if spec.quick else _estimate(spec, named, strategy, devices)
        if estimate is None:
            return SharedSamples(f"samples that {devices} devices share (Ulysses) are not predicted: {command}")
        if estimate.fits:
            break
    speed = f" at {estimate.tokens_per_second:,.0f} tokens/s" if estimate.tokens_per_second else ""
    needs = f"{gib(estimate.device_bytes)} of each of {devices} devices that share samples ({strategy}, Ulysses)"
    text = f"{needs}{speed}{'' if estimate.fits else ', which is too much'}: {command}"
    return SharedSamples(text, estimate.fits, estimate.device_bytes)


def _estimate(spec: JobSpec, named: str, strategy: str, devices: int) -> Estimate | None:
    """The prediction of what the command starts; None where there is none."""
    preset = preset_by_name(named, spec.preset.method, strategy)
    preset = replace(preset, effective_batch_size=spec.effective_batch_size, micro_batch_size=1)
    training = {**spec.training, "per_device_train_batch_size": 1}
    try:
        job = spec_job(replace(spec, preset=preset, strategy=None, sequence_parallel=devices, training=training))
        return estimate_job(job, on_all_cores)
    except InputError:  # as of TRL's trainers, and of windows without flash attention
        return None


def _named_box(preset: Preset) -> str | None:
    """The preset of as many of the same devices, which export takes."""
    boxes = ((name, preset_by_name(name)) for name in list_presets())
    same = (preset.hardware.name, preset.processes)
    return next((name for name, box in boxes if (box.hardware.name, box.processes) == same), None)


def _most_devices(spec: JobSpec) -> int:
    """The most devices that can share a sample: they share attention heads, and stay within a machine."""
    processes = spec.preset.processes // spec.preset.machines
    counts = range(processes, 0, -1)
    return next(count for count in counts if processes % count == 0 and divides_heads(spec.config, count))
