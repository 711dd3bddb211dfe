"""The frames, frame size and micro-batch of a video job that are predicted to fit a device, by one rule.

presets/video_tiers.json has them for every preset of one device (benchmarks/video_tiers.py).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.estimator.architectures import list_architectures, load_config
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.estimator.tracing.model import count_weights
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.estimator.training_fields import evaluates
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.few_logits import with_few_logits
from hf_memopt.planner.first_fit import FirstFit
from hf_memopt.presets import Preset
from hf_memopt.units import GIB
from hf_memopt.video.inputs import VideoInputs
from hf_memopt.video.pixels import FAMILIES

EFFECTIVE_BATCH = 32
SHARE = 0.90  # of a device's memory: what MemoryArguments.target_memory_utilization aims at
# Bytes of a device (from; an "8 GB" card has a little less, and so have the others) -> the founding guide's frames and
# micro-batch, from and to: 8 GB, 16 GB, 24 GB and more.
GUIDE = ((0, (50, 75), (2, 4)), (14 * GIB, (100, 150), (4, 8)), (21 * GIB, (200, 200), (8, 16)))
_FRAMES = (200, 150, 100, 75, 50, 32, 16, 8)  # the guide's, and fewer
_SIDES = (448, 336, 224)  # of a square frame, pixels; 224 is what the smallest of today's video models see
# A weight's bytes that cannot be saved on: 4-bit weights, weights of 16 bits, and those with their gradients.
_LEAST = {"qlora": 0.5, "lora": 2, "full": 4}


@dataclass(frozen=True)
class Clip:
    """Frames of a clip, the side of a square frame in pixels, clips in a micro-batch."""

    frames: int
    side: int
    micro_batch: int


_FIRST = (Clip(8, 224, 1), Clip(75, 224, 2))  # the clips that the line is drawn through


@dataclass(frozen=True)
class FixedLimits:
    """Limits that stay: frames, height × width of a frame, the micro-batch; None for what is to be chosen."""

    max_frames: int | None = None
    max_pixels_per_frame: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class Tier:
    """The clips that fit.

    Attributes:
        max_pixels_per_frame: None where the model sees frames of one size alone.
        estimate: of that job.
    """

    max_frames: int
    max_pixels_per_frame: int | None
    micro_batch: int
    estimate: Estimate


class NothingFits(Exception):
    """Not even the smallest clip fits.

    Attributes:
        needed: bytes that it takes at least.
        available: bytes that may be used.
    """

    def __init__(self, needed: int, available: int):
        super().__init__(f"{needed} of {available} bytes")
        self.needed, self.available = needed, available


def guide_row(memory: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The guide's frames and micro-batch for a device, each from and to.

    Args:
        memory: bytes of the device.
    """
    return next((frames, micro) for smallest, frames, micro in reversed(GUIDE) if memory >= smallest)


def ranked_clips(memory: int, effective: int, fixed: FixedLimits) -> Iterator[Clip]:
    """Clips, the preferred first: most frames first, then memory for the guide's smallest micro-batch
    in frames that are as large as possible, then a larger micro-batch.

    Args:
        memory: bytes of the device, which decide the guide's row.
        effective: samples of an optimizer step, which every micro-batch must divide.
    """
    (_, most_frames), (fewest, most) = guide_row(memory)
    frames = (fixed.max_frames,) if fixed.max_frames else [count for count in _FRAMES if count <= most_frames]
    sides = (math.isqrt(fixed.max_pixels_per_frame),) if fixed.max_pixels_per_frame else _SIDES
    batches = [size for size in range(min(most, effective), 0, -1) if effective % size == 0]
    if fixed.micro_batch:
        batches, fewest = [fixed.micro_batch], fixed.micro_batch
    usual = [size for size in batches if size >= fewest]
    for count in frames:
        for side in sides:
            yield from (Clip(count, side, size) for size in usual)
        yield from (Clip(count, sides[-1], size) for size in batches if size < fewest)


@dataclass(frozen=True)
class TierLimits:
    """What a tier is chosen for.

    Attributes:
        effective_batch_size: samples of an optimizer step.
        fixed: what stays.
        memory: bytes that the device has for the job; None for all of its memory.
        share: of it that may be filled.
        longest: tokens of a sample, at most.
    """

    effective_batch_size: int = EFFECTIVE_BATCH
    fixed: FixedLimits = FixedLimits()
    memory: int | None = None
    share: float = SHARE
    longest: float = math.inf


def choose_tier(
    job: Job, limits: TierLimits, note: Callable[[str], None] = lambda text: None, map_fn=on_all_cores
) -> Tier:
    """The first of the candidates that is predicted to fit.

    Memory grows linearly with the tokens of a micro-batch, so that two estimates point to a third, which is made too:
    the answer was estimated itself.

    Args:
        job: with `video`, whose clip is varied.
        note: called with what is being estimated.
        map_fn: as for estimate_job().

    Raises:
        NothingFits: what is given leaves no clip that fits.
        InputError: the job cannot be traced, or its device's memory is not known.
    """
    memory = limits.memory or job.device.memory
    if not memory:
        raise InputError(f"the memory of {job.device.label} is not known")
    budget = int(memory * limits.share)
    if (needed := _least_bytes(job)) > budget:
        raise NothingFits(needed, budget)
    clips = wanted_clips(job, memory, limits)
    search = FirstFit(
        candidates=clips,
        tokens=lambda clip: _load(job, clip),
        build=lambda clip: with_clip(job, clip, limits.effective_batch_size),
        used=lambda estimate: (estimate.device_bytes,),
        limits=(budget,),
        say=lambda clip: note(f"{clip.frames} frames of {clip.side} × {clip.side}, micro-batch {clip.micro_batch}"),
        map_fn=map_fn,
    )
    for first in _FIRST:
        if first is _FIRST[0] or search.open_candidates():  # where the smallest clip does not fit, none does
            search.estimate(first)
    clip = search.find()
    if clip is None:
        raise NothingFits(int(min((search.needs(clip)[0] for clip in clips), default=needed)), budget)
    one_size = _tokens(job, Clip(2, 448, 1)) == _tokens(job, Clip(2, 224, 1))  # LLaVA-OneVision, SmolVLM, InternVL
    pixels = limits.fixed.max_pixels_per_frame or (None if one_size else clip.side**2)
    return Tier(clip.frames, pixels, clip.micro_batch, search.estimates[clip])


def wanted_clips(job: Job, memory: int, limits: TierLimits) -> list[Clip]:
    """The candidates that keep to the longest sample, or the shortest where none does: what is too long loses frames
    when it is encoded.

    Args:
        memory: bytes of the device.
    """
    clips = list(ranked_clips(memory, limits.effective_batch_size, limits.fixed))
    if limits.fixed.max_frames:
        return clips
    positions = getattr(job.config.get_text_config(), "max_position_embeddings", None) or math.inf
    tokens = {clip: _tokens(job, clip) for clip in clips}
    longest = max(min(limits.longest, positions), min(tokens.values()))
    return [clip for clip in clips if tokens[clip] <= longest]


def with_clip(job: Job, clip: Clip, effective_batch_size: int) -> Job:
    """The job on such clips, with the micro-batch that an effective batch is divided into."""
    batch = {
        "per_device_train_batch_size": clip.micro_batch,
        "per_device_eval_batch_size": _evaluated_at_once(job) or clip.micro_batch,
        "gradient_accumulation_steps": max(1, effective_batch_size // clip.micro_batch),
    }
    return replace(job, video=_video(job, clip), fields={**job.fields, **batch}, seq_len=_tokens(job, clip))


def _video(job: Job, clip: Clip) -> VideoInputs:
    return replace(job.video, frames=clip.frames, height=clip.side, width=clip.side, max_pixels_per_frame=clip.side**2)


def _tokens(job: Job, clip: Clip) -> int:
    """Tokens of a sample."""
    return _video(job, clip).seq_len(job.config)


def _load(job: Job, clip: Clip) -> int:
    """Tokens of a micro-batch, and of an evaluation's where it may be the larger: a clip whose load is no larger in
    either is no larger here."""
    return (clip.micro_batch + _evaluated_at_once(job)) * _tokens(job, clip)


def _evaluated_at_once(job: Job) -> int:
    """Samples of an evaluation's micro-batch that was given; 0 where it follows the step's: see tier_job()."""
    return job.fields["per_device_eval_batch_size"] if evaluates(job.fields) else 0


def _least_bytes(job: Job) -> int:
    """Bytes of the weights alone, and of their gradients where all are trained."""
    return int(_LEAST[job.method] * count_weights(job.config, job.task))


def bundled_video_models() -> list[str]:
    """The bundled architectures that see videos."""
    return [name for name in list_architectures() if load_config(name).model_type in FAMILIES]


def tier_job(preset: Preset, config, **changes: Any) -> Job:
    """The video recipe's job with a preset: vision tower frozen, logits of answers alone, layers checkpointed.

    Args:
        preset: as the recipe changes it.
        changes: further fields of JobSpec, over these; `video_settings`, of the checkpoint's video processor, instead
            of `video`.
    """
    training = {"activation_checkpointing": True, **changes.pop("training", {})}
    if "per_device_eval_batch_size" not in training:
        # An evaluation needs less than a step of the same micro-batch, and its trace takes a third of the time.
        training["eval_strategy"] = "no"
    clip = _FIRST[0]
    job = {
        "video": VideoInputs(
            clip.frames, clip.side, clip.side, clip.side**2, settings=changes.pop("video_settings", {})
        ),
        "frozen": ("vision",),
        "memory_args": with_few_logits(changes.pop("memory_args", MemoryArguments()), config),
    }
    training["per_device_train_batch_size"] = 1
    return spec_job(preset_spec(preset, config, **{**job, **changes}, world_size=1, training=training))
