"""Causes of memory that ran out, and what helps: from when it did, and what the message says."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_memopt.levers import changes
from hf_memopt.levers.facts import Facts
from hf_memopt.levers.features.loss_chunks import LOSS_CHUNKS
from hf_memopt.monitor.growth import ADVICE
from hf_memopt.oom.classify import KILLED, Diagnosis, OomKind
from hf_memopt.oom.failing_frames import FrameRow
from hf_memopt.units import GIB, gib

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
    (changes.EXPANDABLE_SEGMENTS, changes.SPLIT_SIZE, changes.GROUP_BY_LENGTH, changes.EMPTY_CACHE),
)
_OTHERS = ("other processes hold {others} of the device", (changes.END_OTHERS, changes.AUTO, changes.MEMORY_LIMIT))
# What the allocators of other devices than CUDA's print.
_DEVICES = {
    "mps": r"MPS backend|Metal|kIOGPU|Invalid buffer size: ",
    "rocm": r"\bHIP\b|\bhip[A-Z]",
    "xpu": r"\bXPU\b|UR_RESULT_ERROR",
    "cpu": r"DefaultCPUAllocator",
}


# What frames show of the job: field of its setup, value, pattern. The first of a field counts.
_SETUPS = (
    ("strategy", "zero3", r"deepspeed/runtime/zero/(stage3|partition)"),
    ("strategy", "zero2", r"deepspeed/runtime/zero/stage_1_and_2"),
    ("strategy", "fsdp2", r"/fsdp/|fully_shard"),
    ("strategy", "ddp", r"nn/parallel/distributed"),
    ("offload", "cpu", r"cpu_adam"),
    ("method", "qlora", r"4bit|Linear4bit"),
    ("method", "lora", r"/peft/"),
    ("activation_checkpointing", True, r"torch/utils/checkpoint|gradient_checkpointing"),
    ("optim", "adamw_8bit", r"bitsandbytes/optim"),
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Facts of a job that ran out of memory.

    Attributes:
        diagnosis: what ran out.
        stage: load, forward, backward, generate, optimizer, eval, save or resume; None where unknown.
        step: optimizer steps that were done; None where unknown.
        grown: what the monitor said that memory grows by (monitor.growth.ADVICE).
        longest: whether this batch is the largest so far; None where unknown.
        job: its settings; None where only the message is left.
        frame: what the failing frames say; None where they say no more than the stage.
        offloads: True if it offloads to host memory.
        ranks: True if a launcher started it, so that there may be several processes.
    """

    diagnosis: Diagnosis
    stage: str | None = None
    step: int | None = None
    grown: str | None = None
    longest: bool | None = None
    job: Facts | None = None
    figures: Mapping[str, int] = field(default_factory=dict)
    frame: FrameRow | None = None
    offloads: bool = False
    ranks: bool = False

    @property
    def known_job(self) -> Facts:
        """The job, or what its message tells of it."""
        return self.job or guess_job(self.diagnosis.message)

    @property
    def fragmented(self) -> bool:
        """True if the allocation would fit what is free and what no tensor is in, were they in one piece."""
        figures = self.figures
        unused, asked = figures.get("unused_bytes", 0), figures.get("asked_bytes", 0)
        fits = asked <= unused + figures.get("free_bytes", 0)
        return fits and unused > 0.05 * figures.get("capacity_bytes", 0)

    @property
    def squeezed(self) -> bool:
        """True if other processes hold what the allocation needs."""
        figures = self.figures
        others = figures.get("others_bytes", 0)
        needed = figures.get("asked_bytes", 0) - figures.get("free_bytes", 0) - figures.get("unused_bytes", 0)
        return others > max(GIB, 0.05 * figures.get("capacity_bytes", 0)) and others >= needed


def guess_job(message: str, frames: Sequence[str] = ()) -> Facts:
    """Guess the job from a failure's message and frames: its kind of device is CUDA where no other is named."""
    job = Facts.on_device(next((name for name, pattern in _DEVICES.items() if re.search(pattern, message)), "cuda"))
    text, shown = "\n".join(frames), {}
    for name, value, pattern in _SETUPS:
        if name not in shown and re.search(pattern, text):
            shown[name] = value
    return replace(job, setup=replace(job.setup, **shown))


def explain(failure: Failure) -> tuple[str, list[str]]:
    """The likely cause in a sentence, and up to three changes that help, the most effective first."""
    why, rows = _cause(failure)
    return why, rows if isinstance(rows, list) else changes.advice(failure.known_job, rows)


def _cause(failure: Failure) -> tuple[str, tuple[changes.Change, ...] | list[str]]:
    """The cause with rows of the table, or with sentences where the fix is no setting."""
    frame, figures = failure.frame, failure.figures
    cause, _, fixes = failure.diagnosis.cause.partition(": ")
    if frame is not None and frame.pinned:
        return frame.why, frame.changes
    on_host = failure.diagnosis.kind is OomKind.HOST and not fixes
    if cause.startswith(KILLED) or (on_host and (failure.stage in ("load", None) or failure.offloads)):
        # The host's memory ran out, or the system killed a process for it.
        why = failure.diagnosis.cause
        if failure.stage == "load":
            loading = (changes.LOAD_ONCE, changes.MORE_HOST_MEMORY)
            return f"{why}: while the model loaded", loading if failure.ranks else loading[::-1]
        if failure.offloads:
            return f"{why}: what is offloaded lies there", (
                *(changes.OFFLOAD_LESS, changes.MORE_HOST_MEMORY, changes.FEWER_WORKERS),
            )
        return why, (changes.MORE_HOST_MEMORY, changes.FEWER_WORKERS, changes.OFFLOAD_LESS)
    if fixes or not cause:
        return cause, fixes.split("; ") if fixes else [cause]
    if failure.grown:
        return f"memory grew: {failure.grown}: {ADVICE[failure.grown]}", LATER_CHANGES
    if failure.squeezed:
        why, rows = _OTHERS
        return why.format(others=gib(figures["others_bytes"])), rows
    why, rows = _of_frame(failure) if frame else _of_stage(failure)
    if not failure.fragmented:
        return why, rows
    fragmented, remedies = _FRAGMENTED
    fragmented = fragmented.format(unused=gib(figures["unused_bytes"]))
    if failure.stage in ("forward", "backward", None):  # what comes and goes in a step leaves the gaps
        return fragmented if frame is None else f"{fragmented}; and {why}", (*remedies[:2], *rows[:1], *remedies[2:])
    return f"{why}; and {fragmented}", (*rows[:2], *remedies[:2])


def _of_frame(failure: Failure) -> tuple[str, tuple[changes.Change, ...]]:
    """What the failing frames say; of a step that was not the first, also that a longer batch than before came."""
    frame, step = failure.frame, failure.step
    if failure.diagnosis.kind is OomKind.HOST:  # which the logits of an evaluation would only go to
        return frame.why, tuple(change for change in frame.changes if change is not changes.EVAL_ACCUMULATION)
    if step is None or step < 2 or frame.stage != "forward":
        return frame.why, frame.changes
    return f"it fitted for {step} steps, so a longer batch than before came: {frame.why}", (
        *(*frame.changes[:1], changes.PROBE, *frame.changes[1:]),
    )


def _of_stage(failure: Failure) -> tuple[str, tuple[changes.Change, ...]]:
    """What the stage says; of a step also whether it fitted before."""
    if failure.stage in ("eval", "save", "load", "resume") or (failure.stage == "optimizer" and not failure.step):
        return _BY_STAGE[failure.stage]
    why, rows = _BY_STAGE["step"]
    step, longest = failure.step, failure.longest
    if not step or (step == 1 and longest is None):
        return f"from the first step on: {why}" if step == 0 else why, rows
    later = (*LATER_CHANGES[:2], rows[0])
    if longest is None:
        return _LATER.format(step=step), later
    return (_LONGER if longest else _INTERMITTENT).format(step=step), later if longest else LATER_CHANGES
