"""A JobSpec settled on one method: what the user left out is the preset's or the device's."""

from dataclasses import replace
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.estimator.quantized_checkpoints import dequantized
from hf_memopt.estimator.spec_job import adapted, read_model, sample_length
from hf_memopt.estimator.tracing.model import resolve_dtype
from hf_memopt.estimator.tracing.tasks import EMBEDDINGS, find_task, infer_task
from hf_memopt.estimator.trl_tasks import TRL_TASKS, model_task
from hf_memopt.field_values import fit
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.host_memory import assumed_host_memory, own_host_memory
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choices import sharing_counts
from hf_memopt.planner.devices import resolve_preset, split_count
from hf_memopt.planner.trl_choices import TrlSpace, trl_space
from hf_memopt.presets import Preset
from hf_memopt.presets.batch import EFFECTIVE_BATCH, batch_settings
from hf_memopt.stack.vocabulary import argument_hints, newest
from hf_memopt.units import gib

# Whose batches are counted in tokens, as the recipes' are.
PLANNED_TASKS = (
    *TRL_TASKS,
    *("causal-lm", "image-text-to-text", "seq2seq-lm", "masked-lm", "sequence-classification"),
    *("token-classification", "question-answering", "multiple-choice", EMBEDDINGS),
)
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
# TrainingArguments fields that a plan chooses.
_PLANNED = (
    *_BATCH,
    *("activation_checkpointing", "activation_checkpointing_kwargs", "deepspeed", "fsdp", "fsdp_config"),
    *("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"),
)


def of_one_length(spec: JobSpec, methods: tuple[str, ...]) -> JobSpec:
    """With the longest samples of the methods' presets where the user set no length, so that all are asked about the
    same step."""
    if len(methods) == 1 or spec.seq_len is not None:
        return spec
    lengths = [resolve_preset(spec.hardware, method, spec.strategy, spec.world_size).seq_len for method in methods]
    return replace(spec, seq_len=sample_length(spec, max(lengths)))


def settle(spec: JobSpec, method: str) -> JobSpec:
    """The job of one method, checked.

    Raises:
        InputError: a setting that the device, the method or a plan does not take.
    """
    from transformers import TrainingArguments

    spec = read_model(spec)
    task = spec.task or infer_task(spec.config)
    find_task(model_task(task), spec.config, task)
    if task not in PLANNED_TASKS:
        raise InputError(f"task={task}: plan knows models of text and video; `hf-memopt estimate` takes this one")
    if spec.sequence_parallel > 1:
        raise InputError(
            f"sequence_parallel={spec.sequence_parallel}: plan chooses how many devices share a sample: leave it out; "
            "`hf-memopt estimate` predicts this number"
        )
    preset = resolve_preset(spec.hardware, method, spec.strategy, spec.world_size)
    if spec.tool:
        preset = spec.tool.settings(preset, spec)
    if spec.dtype:
        preset = replace(preset, dtype=resolve_dtype(spec.config, spec.dtype))
    row = TRL_TASKS.get(task)
    training = fit(argument_hints(row.config_class if row else TrainingArguments), newest(spec.training))
    spec = replace(spec, preset=preset, method=method, dtype=None, training=training)
    space = trl_space(spec)
    if space is not None and (reason := space.refused(preset.strategy)):
        raise InputError(f"strategy={preset.strategy} with task={task}: {reason}")
    batch, training = _batch(spec, space)
    _check_memory(spec)
    device: Hardware = preset.hardware
    own = spec.hardware == "auto" and device.discrete_memory
    limits = (spec.memory or device.memory, spec.memory_args.max_memory_bytes)
    return replace(
        spec,
        world_size=None,  # the preset's processes are they
        quantization=spec.quantization if method == "qlora" else dequantized(spec.config),
        lora=adapted(spec),
        memory=min(filter(None, limits)),
        host_memory=spec.host_memory or (own_host_memory(preset.processes) if own else assumed_host_memory(device)),
        seq_len=sample_length(spec, preset.seq_len),
        effective_batch_size=batch,
        training=training,
    )


def left_open(spec: JobSpec) -> JobSpec:
    """The job with what its user set of a plan's own settings left open; the effective batch stays.

    So is torch's optimizer where all weights are trained, whose states may be what fills the device.
    """
    training = {key: value for key, value in spec.training.items() if key not in _PLANNED}
    if spec.method == "full" and training.get("optim") in ("adamw_torch", "adamw_torch_fused"):
        del training["optim"]
    devices = spec.hardware.processes if isinstance(spec.hardware, Preset) else split_count(spec.hardware)[1]
    devices = spec.world_size or devices
    batch = [spec.training.get(name, 1 if spec.tool else 0) for name in _BATCH]
    return replace(
        spec,
        world_size=devices if spec.tool else spec.world_size,
        training=training,
        memory_args=replace(spec.memory_args, optimizer_in_backward=False),
        effective_batch_size=spec.effective_batch_size or batch[0] * batch[1] * devices or None,
    )


def _check_memory(spec: JobSpec) -> None:
    """Refuse more than a named card has. A CPU stands for any machine, a Preset for what is free on this one."""
    sizes = {"memory": spec.memory, "host_memory": spec.host_memory and spec.host_memory.bytes}
    for name, value in {**sizes, "seq_len": spec.seq_len}.items():
        if value is not None and value <= 0:
            raise InputError(f"{name}={value} must be above 0{'' if name == 'seq_len' else ' bytes'}")
    device: Hardware = spec.preset.hardware
    # Of unified memory the system gives the device more where that is set (ttm.pages_limit, iogpu.wired_limit_mb).
    most = device.memory if device.discrete_memory else device.nominal_memory
    if device.backend == "cpu" or isinstance(spec.hardware, Preset) or (spec.memory or 0) <= most:
        return
    raise InputError(
        f"memory={gib(spec.memory)}: {device.label} has {gib(most)} for a job; leave it out to plan for "
        "all of it, or describe a device that has more (see docs/plans.md)"
    )


def _batch(spec: JobSpec, space: TrlSpace | None) -> tuple[int, dict[str, Any]]:
    """The effective batch, and the fields with both halves of it where the user set one."""
    devices, effective = spec.preset.processes, spec.effective_batch_size
    fewest = devices // max(sharing_counts(spec), default=1)  # samples at a time
    micro, accumulation = (spec.training.get(name) for name in _BATCH)
    if micro and accumulation and effective is None:
        effective = micro * accumulation * devices
    if space is not None:
        effective = space.whole_batch(effective)
    batch = effective or -(-EFFECTIVE_BATCH // devices) * devices
    if batch < 1 or batch % fewest:
        raise InputError(
            f"effective_batch_size={batch} cannot be split over {devices} devices: use a multiple of {fewest}"
        )
    if not (micro or accumulation):
        return batch, spec.training
    settings = batch_settings(batch, batch, devices, micro, None if micro else accumulation)
    if accumulation not in (None, settings[1]):
        raise InputError(
            f"effective_batch_size={batch} is not per_device_train_batch_size {micro} × "
            f"gradient_accumulation_steps {accumulation} × {devices} devices: leave one out"
        )
    return batch, {**spec.training, **dict(zip(_BATCH, settings, strict=True))}
