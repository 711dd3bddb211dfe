"""Causes of memory that ran out, and what helps: from when it did, and what the message says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_memopt.levers import changes
from hf_memopt.levers.changes import JobFacts
from hf_memopt.levers.features.loss_chunks import LOSS_CHUNKS
from hf_memopt.monitor.growth import ADVICE
from hf_memopt.oom.classify import Diagnosis, OomKind
from hf_memopt.units import GIB, gib

_SIZE = r"(?<![\d.])(\d{1,9}(?:\.\d{1,9})?) (GiB|MiB|KiB|GB|MB)"  # bounded: a long row of digits costs linear time
_FIGURES = {
    "asked_bytes": rf"[Tt]r(?:ied|ying) to allocate {_SIZE}",
    "capacity_bytes": rf"total capacity of {_SIZE}|{_SIZE} total capacity",
    "free_bytes": rf"of which {_SIZE} is free|; {_SIZE} free",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated",
    "unused_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "others_bytes": rf"Process \d{{1,12}} has {_SIZE} memory in use",
}
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}

# Where it happened -> why, and what helps, the most effective first.
_BY_STAGE = {
    "load": (
        "the weights alone do not fit",
        (changes.QLORA, changes.ZERO3, changes.BF16_WEIGHTS, changes.SMALLER_MODEL),
    ),
    "optimizer": (
        "the optimizer makes its states in its first step, beside weights and gradients",
        (changes.ADAM_8BIT, changes.LORA, changes.OPTIMIZER_OFFLOAD, changes.ZERO2, changes.SMALLER_MODEL),
    ),
    "eval": (
        "evaluation batches are larger than training's, or their logits are kept until metrics are computed",
        (changes.EVAL_BATCH, changes.EVAL_HALVES, changes.EVAL_TOKENS),
    ),
    "save": (
        "saving gathers on one device what training had sharded",
        (changes.SHARDED_SAVE, changes.SAVE_MODEL_ONLY, changes.SAVE_BY_TENSOR),
    ),
    "resume": (
        "a checkpoint's optimizer states were loaded onto the device beside the new ones",
        (changes.RESUME_THROUGH_HOST, changes.ADAM_8BIT, changes.EXPANDABLE_SEGMENTS),
    ),
    "step": (
        "activations and logits of a micro-batch do not fit beside weights, gradients and optimizer states",
        (changes.CHECKPOINTING, LOSS_CHUNKS, changes.SMALLER_BATCH),
    ),
}
_LATER = (
    "it fitted for {step} steps, so a longer batch than before came, tensors are kept from step to step (losses "
    "stored without item()), or memory is fragmented"
)
_LONGER = "it fitted for {step} steps, and this batch is larger than all before it: the data decide the peak"
_INTERMITTENT = (
    "it fitted for {step} steps, larger batches among them: memory is fragmented, another process took some, or "
    "tensors are kept from step to step (losses stored without item())"
)
LATER_CHANGES = (changes.PROBE, changes.MEMORY_TRAINER, changes.EXPANDABLE_SEGMENTS)
_FRAGMENTED = (
    "memory is fragmented: the allocator holds {unused} that no tensor is in",
    (changes.EXPANDABLE_SEGMENTS, changes.GROUP_BY_LENGTH, changes.EMPTY_CACHE),
)
_OTHERS = (
    "other processes hold {others} of the device",
    (changes.END_OTHERS, changes.AUTO, changes.MEMORY_LIMIT),
)
# What the allocators of other devices than CUDA's print.
_DEVICES = {
    "mps": r"MPS backend|Metal|kIOGPU|Invalid buffer size: ",
    "rocm": r"\bHIP\b|\bhip[A-Z]",
    "xpu": r"\bXPU\b|UR_RESULT_ERROR",
    "cpu": r"DefaultCPUAllocator",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Facts of a job that ran out of memory.

    Attributes:
        diagnosis: what ran out.
        stage: load, forward, backward, optimizer, eval, save or resume; None where unknown.
        step: optimizer steps that were done; None where unknown.
        grown: what the monitor said that memory grows by (monitor.growth.ADVICE).
        longest: whether this batch is the largest so far; None where unknown.
        job: its settings; None where only the message is left.
    """

    diagnosis: Diagnosis
    stage: str | None = None
    step: int | None = None
    grown: str | None = None
    longest: bool | None = None
    job: JobFacts | None = None
    figures: Mapping[str, int] = field(default_factory=dict)

    @property
    def known_job(self) -> JobFacts:
        """The job, or what its message tells of it."""
        return self.job or guess_job(self.diagnosis.message)


def guess_job(message: str) -> JobFacts:
    """Guess the job from a failure's message: its kind of device, CUDA where no other is named."""
    devices = (name for name, pattern in _DEVICES.items() if re.search(pattern, message))
    return JobFacts.on_device(next(devices, "cuda"))


def parse_figures(text: str) -> dict[str, int]:
    """The last of each figure that a message names, in bytes; of other processes, all of them together."""
    figures = {}
    for name, pattern in _FIGURES.items():
        sizes = [_bytes(match.groups()) for match in re.finditer(pattern, text)]
        if sizes:
            figures[name] = sum(sizes) if name == "others_bytes" else sizes[-1]
    return figures


def _bytes(groups: tuple[str | None, ...]) -> int:
    number, unit = [part for part in groups if part is not None][:2]
    return int(float(number) * _UNITS[unit])


def explain(failure: Failure) -> tuple[str, list[str]]:
    """The likely cause in a sentence, and up to three changes that help, the most effective first."""
    why, rows = _cause(failure)
    return why, rows if isinstance(rows, list) else changes.advice(failure.known_job, rows)


def _cause(failure: Failure) -> tuple[str, tuple[changes.Change, ...] | list[str]]:
    """The cause with rows of the table, or with sentences where the fix is no setting."""
    kind, cause, figures = failure.diagnosis.kind, failure.diagnosis.cause, failure.figures
    capacity = figures.get("capacity_bytes", 0)
    if kind not in (OomKind.DEVICE, OomKind.LIBRARY_WORKSPACE) and "host memory ran out" not in cause:
        return cause, [cause.partition(": ")[2] or cause]
    if failure.grown:
        return f"memory grew: {failure.grown}: {ADVICE[failure.grown]}", LATER_CHANGES
    if figures.get("others_bytes", 0) > max(GIB, 0.05 * capacity):
        why, rows = _OTHERS
        return why.format(others=gib(figures["others_bytes"])), rows
    if figures.get("unused_bytes", 0) > max(figures.get("asked_bytes", 0), 0.05 * capacity):
        why, rows = _FRAGMENTED
        return why.format(unused=gib(figures["unused_bytes"])), rows
    if failure.stage in ("eval", "save", "load", "resume") or (failure.stage == "optimizer" and not failure.step):
        return _BY_STAGE[failure.stage]
    return _cause_in_step(failure)


def _cause_in_step(failure: Failure) -> tuple[str, tuple[changes.Change, ...]]:
    """The cause of a failure in a step that may have fitted before."""
    why, rows = _BY_STAGE["step"]
    step, longest = failure.step, failure.longest
    if not step or (step == 1 and longest is None):
        return f"from the first step on: {why}" if step == 0 else why, rows
    later = (*LATER_CHANGES[:2], rows[0])
    if longest is None:
        return _LATER.format(step=step), later
    return (_LONGER if longest else _INTERMITTENT).format(step=step), later if longest else LATER_CHANGES
