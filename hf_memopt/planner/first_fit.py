"""The first of ranked candidates that fits, where memory grows linearly with tokens: lengths, frames and clips.

A line through two estimates says which candidate to estimate next, until the first that fits was estimated itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.parallel import on_all_cores

TRIES = 6  # estimates


@dataclass(kw_only=True)
class FirstFit:
    """The search over one axis.

    Attributes:
        candidates: the preferred first.
        tokens: of a candidate, which its memory follows.
        build: the job of a candidate.
        used: bytes of an estimate; device memory first.
        limits: bytes of each that may be used.
        say: called with a candidate before it is estimated.
        first: tokens of the first estimate, where there is no line yet and `guess` makes one.
        guess: from the first candidate and its estimate, the tokens of the second one.
        min_share: share of the limits; what fills less of them is no answer before the next larger candidate was
            estimated, whatever the line says: allocators' memory grows in steps. None: the line suffices.
        near: share of a candidate's tokens; the line stands for an estimate so near another.
        slope: two (tokens, estimate) of another axis with the same memory per token.
        map_fn: as for estimate_job().
        estimates: candidate -> its estimate.
    """

    candidates: Sequence[Any]
    tokens: Callable[[Any], float]
    build: Callable[[Any], Job]
    used: Callable[[Estimate], tuple[int, ...]]
    limits: tuple[float, ...]
    say: Callable[[Any], None]
    first: float = 0.0
    guess: Callable[[Any, Estimate], float] | None = None
    min_share: float | None = None
    near: float = 0.0
    slope: list[tuple[float, Estimate]] = field(default_factory=list)
    map_fn: Callable = on_all_cores
    estimates: dict[Any, Estimate] = field(default_factory=dict)

    def find(self) -> Any:
        """The first candidate that an estimate, or the line between two near ones, says fits; None where none does."""
        for _ in range(TRIES):
            pick = self._pick()
            if pick is None or pick in self.estimates or self._is_near(pick):
                return pick
            self.estimate(pick)
        return self._best()

    def estimate(self, candidate: Any) -> Estimate:
        """A candidate's estimate, made at most once."""
        if candidate not in self.estimates:
            self.say(candidate)
            self.estimates[candidate] = estimate_job(self.build(candidate), self.map_fn)
        return self.estimates[candidate]

    def needs(self, candidate: Any) -> tuple[float, ...]:
        """Bytes of each limit: estimated where that was done, else on the line."""
        if candidate in self.estimates:
            return self.used(self.estimates[candidate])
        tokens = self.tokens(candidate)
        (start, estimate), *_ = points = self.nearest(tokens)
        if len(points) == 1:
            return self.used(estimate)
        (left, low), (right, high) = points[-2:]
        rises = zip(self.used(low), self.used(high), strict=True)
        slopes = (abs(end - base) / abs(right - left) for base, end in rises)
        return tuple(base + slope * (tokens - start) for base, slope in zip(self.used(estimate), slopes, strict=True))

    def nearest(self, tokens: float) -> list[tuple[float, Estimate]]:
        """(tokens, estimate) where the line begins; then, where it is known, the two that its slope is of."""
        own = {self.tokens(candidate): estimate for candidate, estimate in self.estimates.items()}
        nearest = sorted(own.items(), key=lambda point: abs(point[0] - tokens))[:2]
        return nearest + self.slope[-2:] if len(nearest) == 1 else nearest or self.slope

    def open_candidates(self) -> list[Any]:
        """The candidates that no estimate rules out: what does not fit, does not fit with more tokens either."""
        too_many = [
            self.tokens(candidate) for candidate, estimate in self.estimates.items() if not self.fits(estimate)
        ]
        limit = min(too_many, default=float("inf"))
        return [candidate for candidate in self.candidates if self.tokens(candidate) < limit]

    def _pick(self) -> Any:
        best = self._best()
        unsure = best is not None and self.min_share is not None
        if unsure and max(self.shares(self.estimates[best])) > self.min_share:
            return best
        candidates = self.open_candidates()
        if len(self.nearest(0)) < 2 and self.guess is not None:
            target = self.guess(*next(iter(self.estimates.items()))) if self.estimates else self.first
            fitting = (candidate for candidate in candidates if self.tokens(candidate) <= target)
        else:
            fitting = filter(self._may_fit, candidates)
        pick = next(fitting, min(candidates, key=self.tokens, default=None))
        if unsure and pick == best:
            larger = (candidate for candidate in candidates if self.tokens(candidate) > self.tokens(best))
            return min(larger, key=self.tokens, default=best)
        return pick

    def _best(self) -> Any:
        estimated = (candidate for candidate in self.candidates if candidate in self.estimates)
        return next((candidate for candidate in estimated if self.fits(self.estimates[candidate])), None)

    def _is_near(self, candidate: Any) -> bool:
        """True if the line is known, and begins so near that it stands for the candidate's estimate."""
        tokens = self.tokens(candidate)
        points = self.nearest(tokens)
        near = bool(self.estimates) and len(points) > 1 and abs(points[0][0] - tokens) < self.near * tokens
        return near and self._may_fit(candidate)

    def fits(self, estimate: Estimate) -> bool:
        """True if an estimate keeps to all limits."""
        return max(self.shares(estimate)) <= 1

    def shares(self, estimate: Estimate) -> list[float]:
        """The share of each limit that an estimate takes."""
        return [used / limit for used, limit in zip(self.used(estimate), self.limits, strict=True)]

    def _may_fit(self, candidate: Any) -> bool:
        return all(used <= limit for used, limit in zip(self.needs(candidate), self.limits, strict=True))
