"""The most frames of a video that fit a device, at several sizes of frame."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.parallel import on_all_cores

# height × width that frames are scaled down to; None is the model's own size.
CAPS = (None, 448 * 448, 224 * 224)
_MOST = 4096  # frames that are asked for, at most
_FIRST = (8, 32)  # frames of the estimates that the line is drawn through
_TRIES = 6


@dataclass(frozen=True)
class Fit:
    """The most frames at a size of frame.

    Attributes:
        max_pixels_per_frame: None for the model's own size.
        max_frames: 0 where not even one fits.
        seq_len: tokens of a sample with so many.
        estimate: of that job, or of the one frame that does not fit.
    """

    max_pixels_per_frame: int | None
    max_frames: int
    seq_len: int
    estimate: Estimate


def most_frames(job: Job, budget: int | None = None, note: Callable[[str], None] = lambda text: None) -> Iterator[Fit]:
    """For each size of frame that differs from the ones before, the most frames with which a job fits its device.

    Memory grows linearly with frames, so two estimates predict where it ends; the answer itself is estimated too.

    Args:
        job: with `video`, whose frames are varied.
        budget: bytes that may be used; by default target_memory_utilization of the device's memory.
        note: called with what is being estimated.

    Raises:
        InputError: the device's memory is not known.
    """
    if budget is None and job.device.memory:
        budget = int(job.device.memory * job.memory_args.target_memory_utilization)
    if not budget:
        raise InputError(f"--frames max: the memory of {job.device.label} is not known; name it with --hardware")
    seen = set()
    for cap in CAPS:
        video = dataclasses.replace(job.video, max_pixels_per_frame=cap)
        size = _size(dataclasses.replace(video, frames=2), job.config)
        if size not in seen:
            seen.add(size)
            yield _most(dataclasses.replace(job, video=video), cap, budget, note)


def _size(video, config) -> tuple:
    """The tokens and pixel shapes of one time step of a clip."""
    media, _, tokens, _ = video.clip(config)
    return tokens, *(tuple(tensor.shape) for name, tensor in media.items() if name.startswith("pixel"))


def _most(job: Job, cap: int | None, budget: int, note: Callable[[str], None]) -> Fit:
    tried: dict[int, Estimate] = {}

    def needed(frames: int) -> int:
        if frames not in tried:
            note(f"{frames} frames of at most {cap or 'any number of'} pixels")
            tried[frames] = estimate_job(_with_frames(job, frames), on_all_cores)
        return tried[frames].device_bytes

    merged = job.video.temporal_patch_size(job.config)
    most = min(_MOST, _positions(job)) // merged * merged
    for frames in _FIRST:
        needed(max(1, min(frames, most)))
    for _ in range(_TRIES):
        low = max((frames for frames in tried if needed(frames) <= budget), default=0)
        high = min([most, *(frames - merged for frames in tried if needed(frames) > budget)])
        guess = min(high, max(1, _extrapolate(tried, budget)) // merged * merged)
        if guess <= low:
            break
        needed(guess)
    low = max((frames for frames in tried if needed(frames) <= budget), default=0)
    shown = max(1, low)
    needed(shown)
    return Fit(cap, low, _tokens(job, shown), tried[shown])


def _with_frames(job: Job, frames: int) -> Job:
    video = dataclasses.replace(job.video, frames=frames)
    return dataclasses.replace(job, video=video, seq_len=_tokens(job, frames))


def _tokens(job: Job, frames: int) -> int:
    """Tokens of a sample."""
    return dataclasses.replace(job.video, frames=frames).seq_len(job.config)


def _positions(job: Job) -> int:
    """The most frames that the model has positions for."""
    limit = getattr(job.config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        return _MOST
    two, four = _tokens(job, 2), _tokens(job, 4)
    return int((limit - two) / max(1e-9, (four - two) / 2)) + 2 if two <= limit else 0


def _extrapolate(tried: dict[int, Estimate], budget: int) -> int:
    """Frames at which the line through the two nearest estimates reaches the budget."""
    if len(tried) < 2:
        return 0
    near = sorted(tried, key=lambda frames: abs(tried[frames].device_bytes - budget))[:2]
    (fewer, more), (less, much) = sorted(near), sorted(tried[frames].device_bytes for frames in near)
    return int(more + (budget - much) * (more - fewer) / max(1, much - less))
