"""Changes to propose to a job: which save the most memory, and which together make it fit, by estimates of each."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.job_checks import check_shared, facts_of
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.smaller import is_from_scratch, smaller_sizes, with_sizes
from hf_memopt.estimator.tracing.parallel import one_by_one
from hf_memopt.estimator.trainer_job import TrainerJob, check_held
from hf_memopt.estimator.training_fields import settle_engine
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.change import Change
from hf_memopt.levers.changes import (
    ADAM_8BIT,
    CHECKPOINTING,
    ESTIMATED,
    EVAL_ACCUMULATION,
    EVAL_BATCH,
    LORA,
    QLORA,
    SHORTER,
    ZERO3,
    ZERO3_OFFLOAD,
    proposals,
)
from hf_memopt.levers.facts import Facts, training_fields
from hf_memopt.levers.features.loss_chunks import LOSS_CHUNKS
from hf_memopt.levers.features.optimizers import OPTIMIZER_OFFLOAD
from hf_memopt.presets import preset_by_name

_LEAST_SAVING = 0.01  # of the peak; less is no advice


def _single_sample(job: Facts) -> dict[str, int] | None:
    micro = job.fields.get("per_device_train_batch_size", 1)
    if micro == 1 or job.memory_args.max_tokens_per_batch is not None:
        return None
    accumulation = job.training.get("gradient_accumulation_steps", 1)
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation * micro}


# What costs least comes first: time alone, then precision, the host, the method, the samples.
_ORDER = (
    *(CHECKPOINTING, LOSS_CHUNKS, Change(compute=_single_sample), EVAL_BATCH, EVAL_ACCUMULATION, ZERO3, ADAM_8BIT),
    *(OPTIMIZER_OFFLOAD, ZERO3_OFFLOAD, LORA, QLORA, SHORTER, SHORTER, SHORTER),
)
IN_EVALUATION = (EVAL_BATCH, EVAL_ACCUMULATION)
# Of a Trainer, whose model and batches are made.
TRAINERS_ORDER = (EVAL_ACCUMULATION, CHECKPOINTING, ADAM_8BIT)


@dataclass(frozen=True)
class Saving:
    """One change and what it is predicted to save.

    Attributes:
        change: the setting, as a command line takes it.
        saved_bytes: of the device's peak.
        fits: True if the job fits with it.
    """

    change: str
    saved_bytes: int
    fits: bool | None


def largest_savings(job: Job, estimate: Estimate, count: int = 3, map_fn=one_by_one) -> list[Saving]:
    """The changes that save most, best first; those that save less than 1 % are left out.

    Each is a whole estimate of its own, so this takes a few seconds.

    Args:
        map_fn: as for estimate_jobs().
    """
    changes = []
    for change, settings in proposals(facts_of(job), ESTIMATED):
        with contextlib.suppress(InputError):  # what the job's trainer does not take
            changes.append((change.written(settings), changed_job(job, settings)))
    return sorted(_estimated(changes, estimate, map_fn), key=lambda saving: -saving.saved_bytes)[:count]


def smaller_models(job: Job, estimate: Estimate, map_fn=one_by_one) -> list[Saving]:
    """The savings of fewer layers, half the width and half the experts; empty for a model with trained weights."""
    if job.peft_config is not None or not is_from_scratch(job.config):
        return []
    changes = []
    for sizes, *_ in filter(None, smaller_sizes(job.config)):
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        smaller = replace(job, config=with_sizes(job.config, sizes))
        changes.append((f"a smaller model, trained from scratch: {text}", smaller))
    return _estimated(changes, estimate, map_fn)


def smallest_combination(
    job: Job, estimate: Estimate, map_fn=one_by_one, order: Sequence[Change] = _ORDER
) -> Saving | None:
    """The fewest and least costly changes with which a job fits; None where all of them do not suffice.

    All are estimated together, then without each of them, the costliest first: some ten estimates.

    Args:
        estimate: the job's.
        map_fn: as for estimate_jobs().
        order: changes to try, the least costly first.
    """
    changes = list(order)
    best = _fitting(_changed(job, changes)[0], map_fn)
    if best is None:
        return None
    for place in reversed(range(len(order))):
        fewer = changes[:place] + changes[place + 1 :]
        smaller = _changed(job, fewer)[0]
        if smaller == _changed(job, changes)[0]:  # it changed nothing here
            changes = fewer
        elif fitting := _fitting(smaller, map_fn):
            changes, best = fewer, fitting
    return Saving(", ".join(_changed(job, changes)[1]), estimate.device_bytes - best.device_bytes, True)


def _fitting(job: Job, map_fn) -> Estimate | None:
    """A job's estimate if it fits."""
    (estimate,) = estimate_jobs([job], map_fn, speed=False)
    return None if isinstance(estimate, InputError) or not estimate.fits else estimate


def _changed(job: Job, changes: Sequence[Change]) -> tuple[Job, list[str]]:
    """A job with changes, one after the other, and their texts; of a setting that changes twice the last one."""
    texts: dict[str, str] = {}
    for change in changes:
        settings = change.settings_for(facts_of(job))
        if settings is None or ("strategy" in settings and job.world_size == 1):
            continue
        try:
            job = changed_job(job, settings)
        except InputError:  # a device without presets, an engine that does not take the trainer's other models
            continue
        name = next(iter(settings))
        texts[name] = f"--strategy {settings['strategy']}" if name == "strategy" else change.written(settings)
    return job, list(texts.values())


def _estimated(changes: list[tuple[str, Job]], estimate: Estimate, map_fn) -> list[Saving]:
    """The savings of changes, without those that cannot be traced or that save too little."""
    estimates = estimate_jobs([changed for _, changed in changes], map_fn, speed=False)
    savings = [
        Saving(change, estimate.device_bytes - changed.device_bytes, changed.fits)
        for (change, _), changed in zip(changes, estimates, strict=True)
        if not isinstance(changed, InputError)
    ]
    return [saving for saving in savings if saving.saved_bytes >= _LEAST_SAVING * estimate.peak_allocated_bytes]


def changed_job(job: Job, settings: Mapping[str, Any]) -> Job:
    memory = {name: value for name, value in settings.items() if name in MemoryArguments.names()}
    changed: dict[str, Any] = {"fields": {**job.fields, **training_fields(settings)}}
    if memory:
        changed["memory_args"] = replace(job.memory_args or MemoryArguments(), **memory)
    if "seq_len" in settings:
        changed["seq_len"] = settings["seq_len"]
    if "max_frames" in settings:
        changed["video"] = job.video.halved()
    if "strategy" in settings:
        fields, engine = settle_engine(changed["fields"], settings["strategy"], job.world_size)
        if isinstance(job, TrainerJob):
            check_held(job.trainer, engine)
        changed |= {"fields": fields, "engine": engine, "rank": engine.peak_rank(job.world_size)}
    if "method" in settings:
        preset = preset_by_name(job.device.name, settings["method"])
        optim = preset.training.get("optim", changed["fields"].get("optim"))
        changed["fields"] = {**changed["fields"], "optim": optim}
        changed |= {"peft_config": job.peft_config or preset.peft_config(), "dtype": preset.dtype}
        if settings["method"] == "qlora":
            from transformers import BitsAndBytesConfig

            changed["quantization_config"] = BitsAndBytesConfig(**preset.quantization())
    job = replace(job, **changed)
    check_shared(job)
    return job
