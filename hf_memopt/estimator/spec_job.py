"""Make the Job that is traced from a JobSpec and its preset."""

import logging
from dataclasses import replace
from typing import Any

from hf_memopt.compatibility import resolve_engine
from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.engines.deepspeed import deepspeed_config, numeric_batch_sizes
from hf_memopt.engines.engine import is_true
from hf_memopt.engines.fsdp import fsdp_settings
from hf_memopt.errors import InputError, brief
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.job_checks import count_positions
from hf_memopt.estimator.quantized_checkpoints import dequantized, holds_fp8
from hf_memopt.estimator.smaller import find_experts, with_sizes
from hf_memopt.estimator.tracing.fake_quantization import is_quantized
from hf_memopt.estimator.tracing.model import supports_checkpointing
from hf_memopt.estimator.tracing.tasks import find_task, infer_task
from hf_memopt.estimator.trl_job import describe_task
from hf_memopt.estimator.trl_tasks import TRL_TASKS, model_task
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.allocator import expands_segments
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.few_logits import with_few_logits
from hf_memopt.presets import Preset
from hf_memopt.presets.accelerate_config import FSDP2
from hf_memopt.presets.training_arguments import resolve
from hf_memopt.stack.vocabulary import newest
from hf_memopt.video.image_inputs import image_inputs
from hf_memopt.video.inputs import frozen_by_settings, video_inputs

logger = logging.getLogger(__name__)

_PROMPT = 512  # tokens; TRL's max_prompt_length, as long as it had one


def read_model(spec: JobSpec) -> JobSpec:
    """The spec with the model's configuration, and with the clips that it takes.

    Raises:
        InputError: an unknown model, or one that takes no videos.
    """
    if spec.config is not None:
        return spec
    config = load_config(spec.model)
    if spec.sizes:
        config = with_sizes(config, spec.sizes)
    spec = replace(spec, config=config)
    if spec.tool and config.get_text_config() is config:
        # Other tools keep adapters off the parts of pictures and sound, of which peft misses one here aloud.
        spec = replace(spec, lora={key: value for key, value in spec.lora.items() if key != "exclude_modules"})
    video = video_inputs(spec.model, config, spec.clips) or image_inputs(spec.model, config, spec.clips, spec.seq_len)
    if video is None:
        return spec
    memory_args = spec.memory_args
    if "logits_to_keep" not in spec.named:  # logits of answers alone, as in the recipe
        memory_args = with_few_logits(memory_args, config, video.answer_tokens)
    return replace(spec, video=video, frozen=frozen_by_settings(spec.clips), memory_args=memory_args)


def preset_spec(preset: Preset, model=None, memory_args: MemoryArguments | None = None, **settings: Any) -> JobSpec:
    """A preset's job, on its reference model and device by default, of a plain Trainer unless there are memory_args.

    Args:
        settings: further fields of JobSpec.
    """
    if model is None:
        model = builtin_model() if preset.reference_model == "builtin" else preset.reference_model
    return read_model(JobSpec(model=model, preset=preset, method=preset.method, memory_args=memory_args, **settings))


def sample_length(spec: JobSpec, usual: int) -> int:
    """Tokens of a sample: the user's, or the usual number within the model's positions; where completions are
    generated, no fewer than a prompt has beside the longest of them.

    Raises:
        InputError: TRL is not installed.
    """
    row = TRL_TASKS.get(spec.task)
    if spec.seq_len is not None:
        return spec.seq_len
    if row and row.generates:
        completion = spec.training.get("max_completion_length", row.config_class.max_completion_length)
        usual = max(usual, _PROMPT + completion) if isinstance(completion, int) else usual
    return min(usual, count_positions(spec.config) or usual)


def spec_job(spec: JobSpec) -> Job:
    """The Job of a spec whose preset and configuration are known.

    Raises:
        InputError: a job that cannot run or is not modelled.
    """
    preset, config, fields = spec.preset, spec.config, newest(spec.training)
    preset = replace(
        preset,
        dtype=preset.dtype if spec.dtype is None else spec.dtype,
        seq_len=sample_length(spec, preset.seq_len),
        sequence_parallel=spec.sequence_parallel if spec.sequence_parallel > 1 else preset.sequence_parallel,
    )
    world_size = preset.processes if spec.world_size is None else spec.world_size
    # More devices than the preset is for may need a larger batch than its own.
    batches = preset.batches(world_size)
    preset = replace(preset, effective_batch_size=-(-preset.effective_batch_size // batches) * batches)
    _refuse_second_engine(spec, preset, fields)
    own = fields.pop("deepspeed", None)
    deepspeed = deepspeed_config(own) if own else preset.deepspeed_config()
    if own:
        fields = numeric_batch_sizes(deepspeed) | fields
    device = spec.hardware if isinstance(spec.hardware, Hardware) else preset.hardware
    if fields.get("use_cpu") and device.backend != "cpu":
        raise InputError(f"use_cpu=true trains on the CPU, and hardware is {device.label}: use hardware=cpu")
    if {"offload", "every_n_layers"}.intersection(fields.get("activation_checkpointing_kwargs") or ()):
        fields = {"activation_checkpointing": True, **fields}  # FSDP's own has no such choice
    row = TRL_TASKS.get(spec.task)
    resolved = resolve(preset, world_size, fields, row and row.config_class)
    if deepspeed:
        resolved["deepspeed"] = deepspeed
    if preset.engine.fsdp_version and world_size > 1:
        # The preset's FSDP2 checkpoints activations, unless the user has the Trainer do so, or neither.
        changed = fsdp_settings(fields.get("fsdp"), fields.get("fsdp_config"))
        off, by_fsdp = fields.get("activation_checkpointing") is False, changed.get("activation_checkpointing")
        if off and is_true(by_fsdp) and spec.tool is None:
            raise InputError(
                "activation_checkpointing=false and fsdp_config.activation_checkpointing=true: leave one of the two "
                "out"
            )
        default = "activation_checkpointing" not in fields and FSDP2["fsdp_activation_checkpointing"]
        resolved["fsdp_config"] = {"activation_checkpointing": default, **changed}
    if "activation_checkpointing" not in fields:
        _leave_out_checkpointing(config, spec.task, resolved)
    lora = adapted(spec)
    if lora != spec.lora:
        logger.warning("experts in FP8 take no adapters: lora.target_modules are %s", lora["target_modules"])
    # On one process FSDP shards nothing.
    strategy = "none" if world_size == 1 and preset.engine.fsdp_version else preset.strategy
    return describe_task(
        config,
        resolved,
        preset.seq_len,
        device,
        peft_config=preset.peft_config(**lora),
        dtype=preset.dtype,
        world_size=world_size,
        strategy=None if deepspeed or fields.get("fsdp") else strategy,  # fields start an engine, or the preset does
        expandable=spec.tool.expandable if spec.tool else bool(preset.name) or expands_segments(),
        quantization_config=quantization_config(spec),
        task=spec.task,
        tool=spec.tool.name if spec.tool else "",
        attn_implementation=spec.attn_implementation,
        kbit_preparation=spec.kbit_preparation,
        autocast_adapter_dtype=spec.tool is None or spec.tool.autocast_adapter_dtype,
        memory_args=spec.memory_args,
        padded=spec.padded,
        packed=spec.packed,
        video=spec.video,
        frozen=spec.frozen,
        shared=preset.sequence_parallel,
    )


def attention_layers(config) -> list[str]:
    """The names of the linear layers of a model's attention."""
    if getattr(config.get_text_config(), "kv_lora_rank", None):
        return ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    return ["q_proj", "k_proj", "v_proj", "o_proj"]


def names_layers(lora: dict[str, Any]) -> bool:
    """True if an adapter's fields say which layers it adapts."""
    return bool({"target_modules", "target_parameters"} & lora.keys())


def adapted(spec: JobSpec) -> dict[str, Any]:
    """The adapter's fields; those of attention alone where the user left open what is adapted, and experts are in FP8,
    which no adapter can train (levers/adapters.py)."""
    if (
        names_layers(spec.lora)
        or spec.preset.method == "full"
        or not find_experts(spec.config)
        or not holds_fp8(spec.config, quantization_config(spec), spec.preset.hardware)
    ):
        return spec.lora
    return {**spec.lora, "target_modules": attention_layers(spec.config)}


def quantization_config(spec: JobSpec):
    """The preset's BitsAndBytesConfig with the user's fields; None where the method is another and no field asks for
    8-bit weights, and for a quantized checkpoint, unless the user says more or it trains dequantized.

    Raises:
        InputError: fields that the method does not take.
    """
    preset, changed = spec.preset, spec.quantization
    if not changed and is_quantized(spec.config):
        return (preset.method != "qlora" and dequantized(spec.config)) or None
    if changed.get("dequantize"):
        if len(changed) > 1:
            raise InputError("quantization.dequantize=true goes with no other quantization.*")
        return changed  # whose configuration it belongs to, the checkpoint says
    changed = {name: value for name, value in changed.items() if name != "dequantize"}
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if changed.get(name)]
    if preset.method != "qlora" and not (preset.method == "lora" and bits):
        if changed:
            raise InputError(
                "quantization.* applies to method=qlora only; load_in_4bit and load_in_8bit to method=lora too, "
                "dequantize to all"
            )
        return None
    from transformers import BitsAndBytesConfig

    settings = changed if changed.get("load_in_8bit") else {**preset.quantization(), **changed}
    if spec.video is not None:  # the vision tower stays as it is
        from transformers import AutoModelForImageTextToText

        from hf_memopt.video.model_parts import not_quantized

        settings = {"llm_int8_skip_modules": not_quantized(spec.config, AutoModelForImageTextToText), **settings}
    return BitsAndBytesConfig(**settings)


def _leave_out_checkpointing(config, task: str | None, resolved: dict) -> None:
    """Without the preset's checkpointing where the model's class has none, as XLNet's: the Trainer would refuse it."""
    if not resolved.get("activation_checkpointing"):
        return
    task = infer_task(config) if task is None else find_task(model_task(task), config, task)
    if not supports_checkpointing(config, task):
        logger.warning("%s has no activation checkpointing: estimated without the preset's", config.model_type)
        for name in ("activation_checkpointing", "activation_checkpointing_kwargs"):
            resolved.pop(name, None)


def _refuse_second_engine(spec: JobSpec, preset: Preset, fields: dict) -> None:
    """Refuse as the run would: Preset.training_arguments() refuses an engine beside the preset's. Where a strategy was
    asked for, refuse settings of another one, too, which would replace it."""
    for name in ("fsdp", "deepspeed"):
        if not fields.get(name):
            continue
        value, strategy = brief(fields[name]), preset.strategy
        if name not in preset.engine.beside:
            raise InputError(f"{name}={value} beside strategy {strategy}: leave one of the two out")
        if spec.strategy and (own := resolve_engine(fields).strategy) != strategy:
            raise InputError(f"{name}={value} is {own}, beside strategy {strategy}: leave one of the two out")
