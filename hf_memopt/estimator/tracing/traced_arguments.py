"""TrainingArguments of a traced job: the real job's, except for what has no effect on memory."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hf_memopt.compatibility.rules import STEPS_IN_BACKWARD
from hf_memopt.errors import InputError, as_input_error
from hf_memopt.stack.vocabulary import spelled

_MICRO_BATCHES = 2  # further ones change only the number of prefetched batches (overheads.add_prefetched)
# What a trace has in place of a field that has no effect on a step's memory there, or is counted elsewhere.
NEUTRAL: dict[str, Any] = {
    # How long training takes, what is logged, saved and resumed: a step is the same.
    "num_train_epochs": 1,
    "warmup_steps": 0,
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
    "ignore_data_skip": False,
    "skip_memory_metrics": True,
    "include_num_input_tokens_seen": "no",
    # Which samples come: the batch is made.
    "dataloader_drop_last": False,
    "remove_unused_columns": False,
    # Host memory, by arithmetic (overheads.host_bytes).
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "dataloader_pin_memory": False,
    # Evaluation is traced by itself (trace._evaluate), sharding by the engine's stand-in.
    "eval_strategy": "no",
    "eval_on_start": False,
    "fsdp": None,
    "fsdp_config": None,
    # The device's own: tensors are as large in TF32. What is compiled a note says.
    "use_cpu": True,
    "tf32": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    # Less than is predicted: after an OOM, or of what the allocator keeps.
    "auto_find_batch_size": False,
    "torch_empty_cache_steps": None,
}


def make_arguments(job, folder: str):
    """TrainingArguments of the real job's class and fields, except for neutral ones, on the CPU.

    Args:
        job: a trace.TracedJob.
        folder: takes the place of output and swap folders.
    """
    from accelerate import PartialState
    from transformers import TrainingArguments

    kind = TrainingArguments if job.trainer is None else type(job.trainer.original.args)
    names = {item.name for item in dataclasses.fields(kind) if item.init}
    fields = {**job.fields, **{name: value for name, value in NEUTRAL.items() if name in names}}
    in_backward = fields.get("optim") in STEPS_IN_BACKWARD or getattr(job.memory_args, "optimizer_in_backward", False)
    two = job.real_states or in_backward  # whose gradients never exist together
    # The first step creates the optimizer's states, the second is like every further one. Without an engine, one step
    # is traced: the states are created from empty gradients (segments), without the first forward and backward.
    fields["max_steps"] = 2 if two or not job.engine.plain else 1
    fields["deepspeed"] = _traceable(fields["deepspeed"], folder) if job.engine.deepspeed else None
    if fields.pop("fp16", False):  # the CPU's autocast has no fp16; in bf16 tensors are as large
        fields["bf16"] = True
    if fields.get("steps_per_generation"):  # TRL's GRPO and RLOO set it, and a batch that follows from it
        fields.pop("generation_batch_size", None)
    fields["gradient_accumulation_steps"] = traced_micro_batches(fields)
    with as_input_error("TrainingArguments", TypeError, AttributeError, LookupError):
        args = kind(output_dir=folder, **spelled(fields))
    # accelerate (1.15) names the device "cpu:0", which FakeTensorMode takes for another device than "cpu".
    PartialState._shared_state["device"] = args.__dict__["_setup_devices"] = torch.device("cpu")
    return args


def traced_micro_batches(fields: Mapping[str, Any]) -> int:
    """The micro-batches that are traced of an optimizer step."""
    accumulation, steps = fields.get("gradient_accumulation_steps", 1), fields.get("steps_per_generation")
    # Where a step generates more than once, the last generates beside gradients.
    return min(accumulation, steps + 1 if steps and steps < accumulation else _MICRO_BATCHES)


def _traceable(config: dict, folder: str) -> dict:
    """A DeepSpeed configuration that swaps to another folder: its swappers create and clear theirs when they start.

    Raises:
        InputError: its optimizer is written in C++, and nothing stands for it here.
    """
    name = (config.get("optimizer") or {}).get("type")
    if str(name).lower() in ("adam", "adamw"):  # DeepSpeed does not know the stand-in, fake_cluster.KernelAdam
        config = {**config, "zero_allow_untested_optimizer": True}
    if str(name).lower() in ("lamb", "lion"):
        raise InputError(
            f"the DeepSpeed JSON's optimizer is {name}, whose kernels cannot be traced: leave `optimizer` out and set "
            "optim"
        )
    zero = dict(config.get("zero_optimization") or {})
    for part in ("offload_optimizer", "offload_param"):
        if "nvme_path" in (zero.get(part) or {}):
            zero[part] = {**zero[part], "nvme_path": folder}
    return {**config, "zero_optimization": zero}
