"""What would save most: the job estimated again with one setting changed."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.smaller import is_from_scratch, smaller_sizes, with_sizes
from hf_memopt.estimator.tracing.parallel import one_by_one
from hf_memopt.estimator.training_fields import fsdp_checkpoints
from hf_memopt.levers.arguments import MemoryArguments

_CHUNK = 512  # tokens


@dataclass(frozen=True)
class Saving:
    """One change and what it is predicted to save.

    Attributes:
        change: in the words of TrainingArguments.
        saved_bytes: of the device's peak.
        fits: whether the job fits with it.
    """

    change: str
    saved_bytes: int
    fits: bool | None


def largest_savings(job: Job, found: Estimate, count: int = 3, map_fn=one_by_one) -> list[Saving]:
    """The changes that save most, best first; those that save nothing are left out.

    Each is a whole estimate of its own, so this takes a few seconds.

    Args:
        map_fn: as for estimate_jobs().
    """
    savings = _estimated(list(_changes(job)), found, map_fn)
    return sorted(savings, key=lambda saving: -saving.saved_bytes)[:count]


def smaller_models(job: Job, found: Estimate, map_fn=one_by_one) -> list[Saving]:
    """What fewer layers, half the width and half the experts save; nothing where the model has trained weights."""
    if job.peft_config is not None or not is_from_scratch(job.config):
        return []
    changes = []
    for sizes, *_ in filter(None, smaller_sizes(job.config)):
        words = ", ".join(f"{name}={size}" for name, size in sizes.items())
        smaller = dataclasses.replace(job, config=with_sizes(job.config, sizes))
        changes.append((f"a smaller model, trained from scratch: {words}", smaller))
    return _estimated(changes, found, map_fn)


def _estimated(changes: list[tuple[str, Job]], found: Estimate, map_fn) -> list[Saving]:
    savings = []
    for (change, _), other in zip(changes, estimate_jobs([changed for _, changed in changes], map_fn), strict=True):
        if isinstance(other, InputError):
            continue
        saved = found.device_bytes - other.device_bytes
        if saved > 0:
            savings.append(Saving(change, saved, other.fits))
    return savings


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    fields = job.fields

    def with_fields(**changed: Any) -> Job:
        return dataclasses.replace(job, fields={**fields, **changed})

    micro, accumulation = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
    if not (fields.get("activation_checkpointing") or fsdp_checkpoints(fields)):
        kwargs = {"use_reentrant": False}
        yield (
            "activation_checkpointing=true",
            with_fields(activation_checkpointing=True, activation_checkpointing_kwargs=kwargs),
        )
    memory = job.memory_args or MemoryArguments()

    def with_memory(**changed: Any) -> Job:
        return dataclasses.replace(job, memory_args=dataclasses.replace(memory, **changed))

    if memory.loss_chunk_size is None and job.task == "causal-lm" and micro * job.seq_len > _CHUNK:
        yield f"loss_chunk_size={_CHUNK}", with_memory(loss_chunk_size=_CHUNK)
    if memory.activation_compression is None and not fields.get("torch_compile"):
        yield "activation_compression=int8", with_memory(activation_compression="int8")
    if micro > 1 and memory.max_tokens_per_batch is None:
        changed = {
            "per_device_train_batch_size": micro // 2,
            "gradient_accumulation_steps": accumulation * micro // (micro // 2),
        }
        yield ", ".join(f"{name}={value}" for name, value in changed.items()), with_fields(**changed)
    if fields.get("eval_strategy") and fields.get("per_device_eval_batch_size", 8) > 1:
        yield "per_device_eval_batch_size=1", with_fields(per_device_eval_batch_size=1)
    optim = str(fields.get("optim", "adamw_torch_fused"))
    if job.peft_config is None and optim.startswith("adamw_torch") and job.engine in ("none", "ddp"):
        yield "optim=adamw_8bit", with_fields(optim="adamw_8bit")
    if (
        not memory.optimizer_cpu_offload
        and job.peft_config is None
        and job.engine == "none"
        and job.device.memory_apart
    ):
        fused = {**fields, "optim": "adamw_torch_fused"}
        yield (
            "optimizer_cpu_offload=true, optim=adamw_torch_fused",
            dataclasses.replace(with_memory(optimizer_cpu_offload=True), fields=fused),
        )
    if job.video is not None:
        if fewer := job.video.halved():
            yield f"max_frames={fewer.frames}", dataclasses.replace(job, video=fewer)
    elif job.seq_len > 512:
        yield f"seq_len={job.seq_len // 2}", dataclasses.replace(job, seq_len=job.seq_len // 2)
    if job.world_size > 1 and job.engine == "ddp":
        yield "strategy=fsdp2", dataclasses.replace(job, engine="fsdp2")
