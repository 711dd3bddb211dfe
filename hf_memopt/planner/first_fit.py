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
        guess: from the estimates so far, the tokens of the next one while there is no line.
        enough: share of the limits; a candidate that fits and fills more of them is the answer.
        near: share of a candidate's tokens; the line stands for an estimate so near another.
        slope: two (tokens, estimate) of another axis with the same memory per token.
        map_fn: as for estimate_job().
        tried: candidate -> its estimate.
    """

    candidates: Sequence[Any]
    tokens: Callable[[Any], float]
    build: Callable[[Any], Job]
    used: Callable[[Estimate], tuple[int, ...]]
    limits: tuple[float, ...]
    say: Callable[[Any], None]
    guess: Callable[[dict[Any, Estimate]], float] | None = None
    enough: float = 1.0
    near: float = 0.0
    slope: list[tuple[float, Estimate]] = field(default_factory=list)
    map_fn: Callable = on_all_cores
    tried: dict[Any, Estimate] = field(default_factory=dict)

    def find(self) -> Any:
        """The first candidate that an estimate, or the line between two near ones, says fits; None where none does."""
        for _ in range(TRIES):
            pick = self._pick()
            if pick is None or pick in self.tried or self._is_near(pick):
                return pick
            self.estimate(pick)
        return self._best()

    def estimate(self, candidate: Any) -> Estimate:
        """A candidate's estimate, made at most once."""
        if candidate not in self.tried:
            self.say(candidate)
            self.tried[candidate] = estimate_job(self.build(candidate), self.map_fn)
        return self.tried[candidate]

    def needs(self, candidate: Any) -> tuple[float, ...]:
        """Bytes of each limit: estimated where that was done, else on the line."""
        if candidate in self.tried:
            return self.used(self.tried[candidate])
        tokens = self.tokens(candidate)
        (start, estimate), *_ = points = self.nearest(tokens)
        if len(points) == 1:
            return self.used(estimate)
        (one, low), (two, high) = points[-2:]
        slopes = (
            abs(more - less) / abs(two - one) for less, more in zip(self.used(low), self.used(high), strict=True)
        )
        return tuple(base + slope * (tokens - start) for base, slope in zip(self.used(estimate), slopes, strict=True))

    def nearest(self, tokens: float) -> list[tuple[float, Estimate]]:
        """(tokens, estimate) where the line begins; then, where it is known, the two that its slope is of."""
        own = {self.tokens(candidate): estimate for candidate, estimate in self.tried.items()}
        nearest = sorted(own.items(), key=lambda point: abs(point[0] - tokens))[:2]
        return nearest + self.slope[-2:] if len(nearest) == 1 else nearest or self.slope

    def open_candidates(self) -> list[Any]:
        """Those that no estimate rules out: what does not fit, does not fit with more tokens either."""
        too_many = [self.tokens(candidate) for candidate, estimate in self.tried.items() if not self.fits(estimate)]
        limit = min(too_many, default=float("inf"))
        return [candidate for candidate in self.candidates if self.tokens(candidate) < limit]

    def _pick(self) -> Any:
        best = self._best()
        if best is not None and max(self.shares(self.tried[best])) > self.enough:
            return best
        candidates = self.open_candidates()
        if len(self.nearest(0)) < 2 and self.guess is not None:
            target = self.guess(self.tried)
            wanted = (candidate for candidate in candidates if self.tokens(candidate) <= target)
        else:
            wanted = filter(self._may_fit, candidates)
        smallest = min(candidates, key=self.tokens, default=None)
        return next(wanted, smallest)

    def _best(self) -> Any:
        return next((one for one in self.candidates if one in self.tried and self.fits(self.tried[one])), None)

    def _is_near(self, candidate: Any) -> bool:
        """Whether the line is known, and begins so near that it stands for the candidate's estimate."""
        tokens = self.tokens(candidate)
        points = self.nearest(tokens)
        near = bool(self.tried) and len(points) > 1 and abs(points[0][0] - tokens) <= self.near * tokens
        return near and self._may_fit(candidate)

    def fits(self, estimate: Estimate) -> bool:
        """Whether an estimate keeps to all limits."""
        return max(self.shares(estimate)) <= 1

    def shares(self, estimate: Estimate) -> list[float]:
        """Of each limit, what an estimate takes."""
        return [used / limit for used, limit in zip(self.used(estimate), self.limits, strict=True)]

    def _may_fit(self, candidate: Any) -> bool:
        return all(used <= limit for used, limit in zip(self.needs(candidate), self.limits, strict=True))
