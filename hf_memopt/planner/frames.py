"""The most frames of a video that fit a device, at several sizes of frame."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.overheads import describe_sample
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.parallel import on_all_cores

# height × width that frames are scaled down to; None is the model's own size.
CAPS = (None, 448 * 448, 224 * 224)
_MOST = 4096  # frames that are asked for, at most
_FIRST = 32  # frames of the first estimate; with fewer, what does not grow with them may decide the peak
_FURTHEST = 8  # times as many or as few for the second, by what grows with tokens in the first
_FIXED = ("parameters", "gradients", "optimizer_states", "communication")  # kinds of memory that do not
_TRIES = 6
_NEAR = 0.05  # of a sample's tokens: so near an estimate, the answer is interpolated


@dataclass(frozen=True)
class MostFrames:
    """The most frames at a size of frame.

    Attributes:
        max_pixels_per_frame: None for the model's own size.
        max_frames: 0 where not even one fits.
        seq_len: tokens of a sample with so many.
        estimate: of that job, or of the one frame that does not fit; its notes say where it was interpolated.
    """

    max_pixels_per_frame: int | None
    max_frames: int
    seq_len: int
    estimate: Estimate


@dataclass(frozen=True)
class _Limit:
    """Where the estimates of one size of frame end. Memory follows the tokens, so other sizes begin there.

    Attributes:
        tokens: of a sample that takes all of the budget.
        near: tokens and estimate of the two samples nearest to it, between which memory is taken as linear.
    """

    tokens: float
    near: tuple[tuple[int, Estimate], tuple[int, Estimate]]


def most_frames(
    job: Job, budget: int | None = None, note: Callable[[str], None] = lambda text: None
) -> Iterator[MostFrames]:
    """For each size of frame that differs from the ones before, the most frames with which a job fits its device.

    Memory grows linearly with frames, so few estimates predict where it ends; the answer itself is estimated too.

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
        video = dataclasses.replace(job.video, max_pixels_per_frame=cap)
        sizes.setdefault(_size(dataclasses.replace(video, frames=2), job.config), (cap, video))
    limit = None
    for number, (cap, video) in enumerate(sizes.values(), 1):
        pixels = f"size {number} of {len(sizes)}, at most {cap or 'any number of'} pixels a frame"
        say = functools.partial(_say, note, pixels)
        search = _FrameSearch(dataclasses.replace(job, video=video), budget, say, limit)
        frames = search.most()
        limit = search.limit() or limit
        shown = max(1, frames)
        yield MostFrames(cap, frames, _tokens(search.job, shown), search.estimate(shown))


def _say(note: Callable[[str], None], pixels: str, text: str) -> None:
    note(f"{pixels}: {text}")


def _size(video, config) -> tuple:
    """The tokens and pixel shapes of one time step of a clip."""
    media, _, tokens, _ = video.clip(config)
    return tokens, *(tuple(tensor.shape) for name, tensor in media.items() if name.startswith("pixel"))


@dataclass
class _FrameSearch:
    """The most frames of one size.

    Attributes:
        start: the limit at another size.
        tried: frames -> their estimate.
        between: the same of what was interpolated.
    """

    job: Job
    budget: int
    note: Callable[[str], None]
    start: _Limit | None
    tried: dict[int, Estimate] = field(default_factory=dict)
    between: dict[int, Estimate] = field(default_factory=dict)

    def most(self) -> int:
        merged = self.job.video.temporal_patch_size(self.job.config)
        most = min(_MOST, _positions(self.job)) // merged * merged
        first = _FIRST if self.start is None else self._frames(self.start.tokens)
        for _ in range(_TRIES):
            low, high = max(self._fitting(), default=0), min([most, *(n - merged for n in self._too_many())])
            if not self.tried:
                guess = first
            elif limit := self.limit():
                guess = self._frames(limit.tokens)
            else:
                guess = self._second(first)
            guess = min(high, max(1, guess // merged * merged))
            if guess <= low:
                break
            if estimate := self._interpolated(guess):
                self.between[guess] = estimate
                break
            self.estimate(guess)
        return max([*self._fitting(), *self.between], default=0)

    def estimate(self, frames: int) -> Estimate:
        if frames in self.between:
            return self.between[frames]
        if frames not in self.tried:
            self.note(f"estimate {len(self.tried) + 1} of at most {_TRIES}, {frames} frames")
            self.tried[frames] = estimate_job(_with_frames(self.job, frames), on_all_cores)
        return self.tried[frames]

    def limit(self) -> _Limit | None:
        """Where the line through the two nearest estimates reaches the budget, or through one with the slope of
        another size."""
        taken = [(_tokens(self.job, frames), estimate) for frames, estimate in self.tried.items()]
        nearest = sorted(taken, key=lambda one: abs(one[1].device_bytes - self.budget))[:2]
        if not nearest or (len(nearest) == 1 and self.start is None):
            return None
        one, two = nearest if len(nearest) == 2 else self.start.near
        slope = abs(two[1].device_bytes - one[1].device_bytes) / abs(two[0] - one[0])
        tokens, estimate = nearest[0]
        return _Limit(tokens + (self.budget - estimate.device_bytes) / max(1e-9, slope), (one, two))

    def _fitting(self) -> list[int]:
        return [frames for frames, estimate in self.tried.items() if estimate.device_bytes <= self.budget]

    def _too_many(self) -> list[int]:
        return [frames for frames, estimate in self.tried.items() if estimate.device_bytes > self.budget]

    def _second(self, first: int) -> int:
        """Where the budget ends if all but the model grows with the tokens of the first estimate."""
        estimate = self.tried[first]
        growing = max(1, estimate.peak_allocated_bytes - sum(estimate.breakdown.get(kind, 0) for kind in _FIXED))
        times = 1 + (self.budget - estimate.device_bytes) / growing
        return self._frames(_tokens(self.job, first) * min(_FURTHEST, max(1 / _FURTHEST, times)))

    def _interpolated(self, frames: int) -> Estimate | None:
        """An estimate by the line that limit() follows; None where no estimate of this size is near."""
        if not self.tried or not (limit := self.limit()):
            return None
        job = _with_frames(self.job, frames)
        tokens, known = job.seq_len, {_tokens(self.job, one): estimate for one, estimate in self.tried.items()}
        nearest = min(known, key=lambda one: abs(one - tokens))
        if abs(nearest - tokens) > _NEAR * tokens:
            return None
        (one, low), (two, high) = limit.near
        share = (tokens - nearest) / (two - one)
        estimate = _moved(known[nearest], low, high, share)
        if estimate.device_bytes > self.budget:
            return None
        kept = (note for note in estimate.notes if not note.startswith("a sample:"))
        said = f"interpolated between estimates of {min(one, two):,} and {max(one, two):,} tokens a sample"
        return dataclasses.replace(estimate, notes=(said, describe_sample(job), *kept))

    def _frames(self, tokens: float) -> int:
        """The most frames of a sample with at most so many tokens."""
        two, four = _tokens(self.job, 2), _tokens(self.job, 4)
        return int(2 + max(-1.0, min(_MOST, (tokens - two) / max(1e-9, (four - two) / 2))) + 1e-6)


def _moved(base: Estimate, low: Estimate, high: Estimate, share: float) -> Estimate:
    """An estimate moved by a share of the way between two others."""

    def moved(start, one, two):
        if isinstance(start, dict):
            return {name: moved(value, one.get(name, 0), two.get(name, 0)) for name, value in start.items()}
        if None in (start, one, two):
            return start
        value = start + share * (two - one)
        return max(0, round(value) if isinstance(start, int) else value)

    names = [field.name for field in dataclasses.fields(base) if field.name.endswith(("_bytes", "_per_second"))]
    names = [name for name in names if name != "capacity_bytes"] + ["breakdown", "phases", "step_seconds"]
    return dataclasses.replace(
        base, **{name: moved(*(getattr(each, name) for each in (base, low, high))) for name in names}
    )


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
