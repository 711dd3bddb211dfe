"""The smallest combination of changes with which a job fits, where no single change suffices."""

from collections.abc import Sequence

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.suggestions import Saving, changed_job, job_facts
from hf_memopt.estimator.tracing.parallel import one_by_one
from hf_memopt.levers.change import Change
from hf_memopt.levers.changes import (
    ADAM_8BIT,
    CHECKPOINTING,
    EVAL_BATCH,
    LORA,
    QLORA,
    SHORTER,
    ZERO3,
    ZERO3_OFFLOAD,
    JobFacts,
)
from hf_memopt.levers.features.loss_chunks import LOSS_CHUNKS
from hf_memopt.levers.features.optimizers import OPTIMIZER_OFFLOAD


def _single_sample(job: JobFacts) -> dict[str, int] | None:
    micro = (job.training or {}).get("per_device_train_batch_size", 1)
    if micro == 1 or job.memory_args.max_tokens_per_batch is not None:
        return None
    accumulation = job.training.get("gradient_accumulation_steps", 1)
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation * micro}


# What costs least comes first: time alone, then precision, the host, the method, the samples.
_ORDER = (
    *(CHECKPOINTING, LOSS_CHUNKS, Change(compute=_single_sample), EVAL_BATCH, ZERO3, ADAM_8BIT, OPTIMIZER_OFFLOAD),
    *(ZERO3_OFFLOAD, LORA, QLORA, SHORTER, SHORTER, SHORTER),
)


def smallest_combination(job: Job, found: Estimate, map_fn=one_by_one) -> Saving | None:
    """The fewest and least costly changes with which a job fits; None where all of them do not suffice.

    All are estimated together, then without each of them, the costliest first: some ten estimates.

    Args:
        found: the job's estimate.
        map_fn: as for estimate_jobs().
    """
    kept = list(_ORDER)
    best = _fitting(_changed(job, kept)[0], map_fn)
    if best is None:
        return None
    for place in reversed(range(len(_ORDER))):
        fewer = kept[:place] + kept[place + 1 :]
        smaller = _changed(job, fewer)[0]
        if smaller == _changed(job, kept)[0]:  # it changed nothing here
            kept = fewer
        elif estimate := _fitting(smaller, map_fn):
            kept, best = fewer, estimate
    return Saving(", ".join(_changed(job, kept)[1]), found.device_bytes - best.device_bytes, True)


def _fitting(job: Job, map_fn) -> Estimate | None:
    """A job's estimate if it fits."""
    (estimate,) = estimate_jobs([job], map_fn, speed=False)
    return None if isinstance(estimate, InputError) or not estimate.fits else estimate


def _changed(job: Job, changes: Sequence[Change]) -> tuple[Job, list[str]]:
    """A job with changes, one after the other, and their texts; of a setting that changes twice the last one."""
    texts: dict[str, str] = {}
    for change in changes:
        settings = change.settings_for(job_facts(job))
        if settings is None or ("strategy" in settings and job.world_size == 1):
            continue
        try:
            job = changed_job(job, settings)
        except InputError:  # a device that the catalog lacks has no presets
            continue
        name = next(iter(settings))
        texts[name] = f"--strategy {settings['strategy']}" if name == "strategy" else change.written(settings)
    return job, list(texts.values())
