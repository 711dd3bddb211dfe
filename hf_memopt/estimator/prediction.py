"""estimate(): from a model's configuration and TrainingArguments to the peak of the job, in seconds."""

import copy
import dataclasses
from typing import Any

from hf_memopt.errors import InputError, as_input_error, one_line
from hf_memopt.estimator.ledger import KINDS, Peak
from hf_memopt.estimator.report import Estimate
from hf_memopt.estimator.trace import trace
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.levers.adapters import add_adapters

_TRACED_WHOLE = 6  # layers; up to this depth the model is traced as it is
_PHASES = ("load", "forward", "backward", "optimizer", "between")


def estimate(model, args, seq_len: int, hardware: str | Hardware = "auto", peft_config=None, dtype: str = "float32",
             attn_implementation: str | None = None, padded: bool = False) -> Estimate:  # fmt: skip
    """Predict the peak memory of a training job on one device, without its weights and without the device.

    The genuine Trainer takes two optimizer steps on fake tensors, on a shallow copy of the model at two depths; every
    segment of the step grows linearly with the number of layers, so the peak at full depth is the largest of the
    segments' own extrapolations.

    Args:
        model: hub id, folder, config.json or PretrainedConfig of a causal language model.
        args: TrainingArguments, or a dict of its fields.
        seq_len: tokens per sample.
        hardware: a name in the catalog. "cpu" counts as the CPU's allocator does.
        peft_config: a LoraConfig; None trains all weights.
        dtype: of the loaded weights.
        attn_implementation: by default the model's own choice, sdpa where it has it. Flash attention is counted as
            sdpa's flash kernel.
        padded: samples are padded, so that an attention mask is built.

    Raises:
        InputError: the model is not known, or the job is of a kind that is not modelled.
    """
    device = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    if getattr(peft_config, "peft_type", None) not in (None, "LORA"):
        raise InputError(f"peft_type={peft_config.peft_type} is not modelled yet: estimate LoRA, or full fine-tuning")
    config = _load_config(model)
    _check_length(config, seq_len)
    fields = _fields(args)
    peaks = _at_full_depth(config, fields, seq_len, device, peft_config, dtype, attn_implementation, padded)
    _add_prefetched(peaks, fields, seq_len, padded)
    _add_workspace(peaks, device)
    segment, peak = max(peaks.items(), key=lambda item: item[1].total)
    return Estimate(
        peak_allocated_bytes=peak.total,
        phase=_phase(segment),
        breakdown={kind: peak.by_kind.get(kind, 0) for kind in KINDS},
        phases={phase: max((found.total for name, found in peaks.items() if _phase(name) == phase), default=0)
                for phase in _PHASES},
        capacity_bytes=device.memory,
        training_arguments=fields,
        notes=_notes(device, fields),
    )  # fmt: skip


def _phase(segment: str) -> str:
    phase = segment.split(":")[0]
    return "load" if phase == "start" else phase


def _load_config(model):
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(model, PretrainedConfig):
        return model
    with as_input_error(f"model {model!r}", OSError, ValueError, KeyError):
        return AutoConfig.from_pretrained(model)


def _check_length(config, seq_len: int) -> None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if seq_len < 1 or (positions and seq_len > positions):
        raise InputError(f"seq_len={seq_len} must be from 1 to the model's {positions} positions")


def _fields(args) -> dict[str, Any]:
    """The fields that were set: those that differ from TrainingArguments' defaults."""
    from transformers import TrainingArguments

    if isinstance(args, dict):
        fields = dict(args)
    else:
        defaults = {item.name: item.default for item in dataclasses.fields(TrainingArguments) if item.init}
        fields = {name: getattr(args, name) for name in defaults if getattr(args, name) != defaults[name]}
    if args_deepspeed := fields.get("deepspeed") or fields.get("fsdp"):
        raise InputError(f"sharded jobs are not modelled yet ({args_deepspeed!r}): estimate one device without it")
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs", "accelerator_config", "output_dir"):
        fields.pop(old, None)
    fields.setdefault("per_device_train_batch_size", 8)
    fields.setdefault("gradient_accumulation_steps", 1)
    optim = getattr(fields.get("optim"), "value", fields.get("optim"))
    if optim:
        fields["optim"] = optim.removeprefix("paged_")  # paged states are counted as if they stayed on the device
    return fields


def _at_full_depth(config, fields, seq_len, device, peft_config, dtype, attn_implementation, padded):
    """Peaks per segment at the model's own depth, from one trace or from two shallow ones."""
    accelerator = device.backend != "cpu"

    def at(depth: int) -> dict[str, Peak]:
        shallow = _with_depth(config, depth)
        try:
            return trace(
                lambda: _make_model(shallow, dtype, attn_implementation, peft_config),
                fields, seq_len, accelerator, padded,
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise InputError(f"the job cannot be traced: {one_line(error)}") from error

    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if depth is None:
        raise InputError(
            f"model type {config.model_type!r} has no num_hidden_layers: only layered models are estimated"
        )
    period = _period(config)
    # Whole periods are added, so that the shallow models end in the same kinds of layers as the deep one.
    shallow = next(n for n in range(max(3, period), 2 * period + 3) if (depth - n) % period == 0)
    if depth <= max(_TRACED_WHOLE, shallow + period):
        return at(depth)
    low, high = at(shallow), at(shallow + period)
    steps = (depth - shallow) // period
    return {name: _extended(low[name], high[name], steps) for name in low.keys() & high.keys()}


def _extended(low: Peak, high: Peak, steps: int) -> Peak:
    """The line through two peaks, `steps` times their distance beyond the first."""
    by_kind = {
        kind: low.by_kind.get(kind, 0) + (high.by_kind.get(kind, 0) - low.by_kind.get(kind, 0)) * steps
        for kind in low.by_kind.keys() | high.by_kind.keys()
    }
    by_kind = {kind: max(0, size) for kind, size in by_kind.items()}
    return Peak(sum(by_kind.values()), by_kind)


def _period(config) -> int:
    """After how many layers the pattern of layer kinds repeats; 1 where all are alike."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    whole = range(1, len(kinds) // 2 + 1)
    return next((n for n in whole if all(kinds[i] == kinds[i - n] for i in range(n, len(kinds)))), 1)


def _with_depth(config, depth: int):
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    text.num_hidden_layers = depth
    return config


def _make_model(config, dtype: str, attn_implementation: str | None, peft_config):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=attn_implementation
    )
    return model if peft_config is None else add_adapters(model, copy.deepcopy(peft_config))


def _add_prefetched(peaks: dict[str, Peak], fields: dict[str, Any], seq_len: int, padded: bool) -> None:
    """The Trainer moves all micro-batches of a step to the device before the first; two of them were traced."""
    more = max(0, fields["gradient_accumulation_steps"] - 2)
    size = more * fields["per_device_train_batch_size"] * seq_len * 8 * (3 if padded else 2)
    for name, peak in peaks.items():
        if _phase(name) != "load":
            _grow(peak, "other", size)


def _add_workspace(peaks: dict[str, Peak], device: Hardware) -> None:
    """cuBLAS keeps a workspace from its first multiplication on: 32 MiB from Hopper on, 8,519,680 bytes before
    (:4096:2:16:8, torch.backends.cuda documentation of CUBLAS_WORKSPACE_CONFIG)."""
    if device.backend != "cuda":
        return
    size = 32 * 2**20 if float(device.architecture) >= 9.0 else 8_519_680
    for name, peak in peaks.items():
        if _phase(name) != "load":
            _grow(peak, "workspace", size)


def _grow(peak: Peak, kind: str, size: int) -> None:
    peak.total += size
    peak.by_kind[kind] = peak.by_kind.get(kind, 0) + size


def _notes(device: Hardware, fields: dict[str, Any]) -> tuple[str, ...]:
    notes = ["predicted for one device; sharding, evaluation and saving are not in it"]
    if device.backend != "cpu":
        notes.append("fragmentation and the driver's context come on top; not checked on a GPU yet")
    if fields.get("torch_compile"):
        notes.append("traced without torch_compile, which usually needs less")
    return tuple(notes)
