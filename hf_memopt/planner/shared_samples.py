"""Samples whose tokens several devices share (DeepSpeed's Ulysses): recipes run them, and nothing predicts them."""

import shlex

from hf_memopt.estimator.architectures import hub_id
from hf_memopt.job.spec import JobSpec
from hf_memopt.packages import is_installed
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.launch import has_recipe, recipe_name
from hf_memopt.presets import Preset, list_presets, preset_by_name


def shared_samples_note(spec: JobSpec, choice: Choice | None) -> str | None:
    """The command that shares samples among devices, where one sample is what fills a device or exceeds it.

    Args:
        choice: the plan's usual one; None where nothing fits.
    """
    preset = spec.preset
    moved = choice is None or (choice.micro_batch == 1 and (choice.inputs_offloaded or choice.activations_offloaded))
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
    command = (
        f"hf-memopt export {named} my-run --strategy zero3 --sequence-parallel {devices} --method {preset.method} "
        f"--recipe {recipe_name(spec)} -- --model_name_or_path {shlex.quote(hub_id(spec.model))} "
        f"--max_length {spec.seq_len} --effective_batch_size {spec.effective_batch_size} "
        "--per_device_train_batch_size 1"
    )
    return f"samples that {devices} devices share (Ulysses) are not predicted; this writes such a job: {command}"


def _named_box(preset: Preset) -> str | None:
    """The preset of as many of the same devices, which export takes."""
    boxes = ((name, preset_by_name(name)) for name in list_presets())
    same = (preset.hardware.name, preset.processes)
    return next((name for name, box in boxes if (box.hardware.name, box.processes) == same), None)


def _most_devices(spec: JobSpec) -> int:
    """The most devices that can share a sample: they share attention heads (deepspeed 0.19, UlyssesSPAttentionHF), and
    stay within a machine."""
    text, processes = spec.config.get_text_config(), spec.preset.processes // spec.preset.machines
    heads = getattr(text, "num_attention_heads", None) or 1
    keys = getattr(text, "num_key_value_heads", None) or heads
    return next(
        count
        for count in range(processes, 0, -1)
        if processes % count == heads % count == 0 and 0 in (keys % count, count % keys)
    )
