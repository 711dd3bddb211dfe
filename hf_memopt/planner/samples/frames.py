"""The most frames of a video that fit a device, at several sizes of frame."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from hf_memopt.errors import InputError
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.overheads import describe_sample
from hf_memopt.estimator.result import Estimate
from hf_memopt.planner.first_fit import TRIES, FirstFit

# height × width that frames are scaled down to; None is the model's own size.
CAPS = (None, 448 * 448, 224 * 224)
_MOST = 4096  # frames that are asked for, at most
_FIRST = 32  # frames of the first estimate; with fewer, what does not grow with them may decide the peak
_FURTHEST = 8  # times as many or as few for the second, by what grows with tokens in the first
_FIXED = ("parameters", "gradients", "optimizer_states", "communication")  # kinds of memory that do not
_NEAR = 0.05  # of a sample's tokens: so near an estimate, the answer is interpolated


@dataclass(frozen=True)
class MostFrames:
    """The most frames at a size of frame.

    Attributes:
        max_pixels_per_frame: None for the model's own size.
        max_frames: 0 where not even one fits.
        seq_len: tokens of a sample with so many.
        estimate: of that job, or of the fewest frames, which do not fit; its notes say where it was interpolated.
    """

    max_pixels_per_frame: int | None
    max_frames: int
    seq_len: int
    estimate: Estimate


def most_frames(
    job: Job, budget: int | None = None, note: Callable[[str], None] = lambda text: None
) -> Iterator[MostFrames]:
    """For each size of frame that differs from the ones before, the most frames with which a job fits its device.

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
    sizes = {}
    for cap in CAPS:
        video = replace(job.video, max_pixels_per_frame=cap)
        sizes.setdefault(_size(replace(video, frames=2), job.config), (cap, video))
    slope: list[tuple[float, Estimate]] = []  # memory follows the tokens, so other sizes begin where the last ended
    for number, (cap, video) in enumerate(sizes.values(), 1):
        pixels = f"size {number} of {len(sizes)}, at most {cap or 'any number of'} pixels a frame"
        search = _search(replace(job, video=video), budget, lambda text, pixels=pixels: note(f"{pixels}: {text}"))
        search.slope = slope
        frames = search.find() or 0
        shown = frames or min(search.candidates, default=1)
        estimate = (
            _interpolated(search, shown) if frames and frames not in search.estimates else search.estimate(shown)
        )
        points = search.nearest(search.tokens(shown))
        slope = points if len(points) > 1 else slope
        yield MostFrames(cap, frames, _tokens(replace(job, video=video), shown), estimate)


def _size(video, config) -> tuple:
    """The tokens and pixel shapes of one time step of a clip."""
    media, _, tokens, *_ = video.clip(config)
    return tokens, *(tuple(tensor.shape) for name, tensor in media.items() if name.startswith("pixel"))


def _search(job: Job, budget: int, note: Callable[[str], None]) -> FirstFit:
    """The search for the most frames of one size."""
    two, four = _tokens(job, 2), _tokens(job, 4)
    per_frame = max(1e-9, (four - two) / 2)
    positions = getattr(job.config.get_text_config(), "max_position_embeddings", None)
    highest = _MOST if positions is None else int((positions - two) / per_frame) + 2 if two <= positions else 0
    merged = job.video.temporal_patch_size(job.config)  # frames of a step in time

    def tokens(frames: int) -> float:
        return two + (frames - 2) * per_frame

    def guess(frames: int, estimate: Estimate) -> float:
        """Guess where the budget ends, as if all but the model grew with the tokens of the first estimate."""
        growing = max(1, estimate.peak_allocated_bytes - sum(estimate.breakdown.get(kind, 0) for kind in _FIXED))
        times = 1 + (budget - estimate.device_bytes) / growing
        return tokens(frames) * min(_FURTHEST, max(1 / _FURTHEST, times))

    search = FirstFit(
        candidates=range(min(_MOST, highest) // merged * merged, 0, -merged),
        tokens=tokens,
        build=lambda frames: replace(job, video=replace(job.video, frames=frames), seq_len=_tokens(job, frames)),
        used=lambda estimate: (estimate.device_bytes,),
        limits=(budget,),
        say=lambda frames: note(f"estimate {len(search.estimates) + 1} of at most {TRIES}, {frames} frames"),
        first=tokens(_FIRST),
        guess=guess,
        near=_NEAR,
    )
    return search


def _interpolated(search: FirstFit, frames: int) -> Estimate:
    """An estimate by the line through the two nearest."""
    tokens = search.tokens(frames)
    points = search.nearest(tokens)
    (start, base), ((fewer, low), (more, high)) = points[0], points[-2:]
    estimate = _moved(base, low, high, (tokens - start) / (more - fewer))
    notes = (note for note in estimate.notes if not note.startswith("a sample:"))
    source = f"interpolated between estimates of {min(fewer, more):,.0f} and {max(fewer, more):,.0f} tokens a sample"
    return replace(estimate, notes=(source, describe_sample(search.build(frames)), *notes))


def _moved(base: Estimate, low: Estimate, high: Estimate, share: float) -> Estimate:
    """An estimate moved by a share of the way between two others."""

    def moved(start, low, high):
        if isinstance(start, dict):
            return {name: moved(value, low.get(name, 0), high.get(name, 0)) for name, value in start.items()}
        if None in (start, low, high):
            return start
        value = start + share * (high - low)
        return max(0, round(value) if isinstance(start, int) else value)

    names = [field.name for field in fields(base) if field.name.endswith(("_bytes", "_per_second"))]
    names = [name for name in names if name != "capacity_bytes"] + ["breakdown", "phases", "step_seconds"]
    return replace(base, **{name: moved(*(getattr(each, name) for each in (base, low, high))) for name in names})


def _tokens(job: Job, frames: int) -> int:
    """Tokens of a sample."""
    return replace(job.video, frames=frames).seq_len(job.config)
