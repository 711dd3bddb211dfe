"""The search: for every profile, the fastest choice whose estimate fits its share of the device."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.cost import Cost
from hf_memopt.planner.sketch import Sketch, caution, sketched_estimate

# No dearer choice is taken for a smaller gain: two published runs of one model and method on one card are off by this
# much against each other, in the median of 96 pairs (3.8 %, benchmarks/results/speed_published.json).
NEIGHBOURS = 1.04
_OPTIMISM = 1.01  # a choice is tried where its sketch exceeds the budget by no more than this
_ROUNDS = 8
_FAILURES = 3  # so many choices, and it is not the choice
_LOOKS = 3  # rounds of estimates for the choice that needs the least
# A plain choice is estimated before another takes its place, unless its sketch exceeds the budget by more than this.
_DOUBT = 1.05


@dataclass
class Search:
    """Choices of one job, their sketch, and the estimates made so far.

    Attributes:
        choices: the preferred ones first (Cost.rank).
        host_memory: what a process may use on the host; None where that is not known. What is only assumed rules out
            choices that offload, and not a model on its way to the device.
        quick: the sketch, with its caution, stands for the estimates, too.
        estimates: choice -> its estimate; None where the job cannot be traced.
        sketch_bytes: choice -> its sketch's bytes, and those that grow with the micro-batch.
        sketch_errors: what estimates exceed their sketches by, and the bytes that grow, by _keys(). Searches on other
            cards may share all three.
    """

    choices: list[Choice]
    sketch: Sketch
    build: Callable[[Choice], Job]
    say: Callable[[str], None]
    _: KW_ONLY
    host_memory: HostMemory | None = None
    quick: bool = False
    estimates: dict[Choice, Estimate | None] = field(default_factory=dict)
    sketch_bytes: dict[Choice, tuple[int, int]] = field(default_factory=dict)
    sketch_errors: dict[tuple, tuple[int, int]] = field(default_factory=dict)
    host_errors: dict[str, int] = field(default_factory=dict)  # the same of host memory, at least; by strategy

    def __post_init__(self) -> None:
        cost = self.cost = Cost(self.sketch)
        self.seconds = {choice: cost.step(choice) for choice in self.choices}
        self._rank = {choice: cost.rank(choice) for choice in self.choices}
        self.choices = sorted(self.choices, key=self._rank.__getitem__)
        for choice in self.choices:
            if choice not in self.sketch_bytes:
                fixed, moving = self.sketch.device_bytes(choice)
                factor = caution(self.sketch.job.device) if self.quick else 1
                self.sketch_bytes[choice] = int(fixed * factor), int(moving * factor)
        suffices = {choice: self._host_suffices(choice, self.sketch.host_bytes(choice)) for choice in self.choices}
        self.short_of_host = [choice for choice in self.choices if not suffices[choice]]
        self.choices = [choice for choice in self.choices if suffices[choice]]

    def fastest_for(self, budgets: Iterable[int]) -> list[Choice | None]:
        """For every memory budget, in bytes, the fastest choice that fits it; None where none does.

        Args:
            budgets: rising; the first is the safe profile's, which takes what is plain if anything plain fits, and
                host memory only where no budget suffices without.
        """
        budgets = list(budgets)
        picks = self._picks_after_estimates(budgets)
        # The sketch may overestimate the choice that needs the least, but not what the host has.
        if None in picks and any(self._host_has(choice) for choice in self._traceable()):
            self.smallest()
            picks = self._picks_after_estimates(budgets)
        for doubted in (self._doubtful, self._kept_out):
            if (choice := doubted(picks, budgets)) is not None:
                self.estimate([choice])
                picks = self._picks_after_estimates(budgets)
        return picks

    def _doubtful(self, picks: list[Choice | None], budgets: list[int]) -> Choice | None:
        """The plain choice that needs the least, where a profile does without a plain one because of its sketch."""
        smallest = min(filter(self.is_plain, self._traceable()), key=self.needs, default=None)
        if smallest is None or smallest in self.estimates or smallest.engine.flat_buffers:  # whose estimates take long
            return None
        without = [budget for pick, budget in zip(picks, budgets, strict=True) if not (pick and self.is_plain(pick))]
        return smallest if any(budget < self.needs(smallest) <= budget * _DOUBT for budget in without) else None

    def _kept_out(self, picks: list[Choice | None], budgets: list[int]) -> Choice | None:
        """A choice that is faster and simpler than a pick, and does not fit by the error of other kinds alone."""
        for pick, budget in zip(picks, budgets, strict=True):
            for choice in self.choices[: self.choices.index(pick)] if pick else ():
                known = choice in self.estimates or any(key in self.sketch_errors for key in self._keys(choice)[:3])
                if known or choice.engine.flat_buffers or self._price(choice)[:3] >= self._price(pick)[:3]:
                    continue
                if self.sketch_bytes[choice][0] <= budget < self.needs(choice) and self._host_has(choice):
                    return choice
        return None

    def sketched(self, budget: int) -> Choice | None:
        """The fastest choice that fits a budget, by the sketch and the estimates made so far; one that needs host
        memory only where no other fits."""
        return self.first(budget, lambda choice: not choice.offloads) or self.first(budget)

    def first(self, budget: int, condition: Callable[[Choice], bool] = lambda choice: True) -> Choice | None:
        """The preferred choice of a kind that fits a budget, by the sketch and the estimates made so far."""
        return next((choice for choice in filter(condition, self.choices) if self.fits(choice, budget)), None)

    @property
    def caution(self) -> float:
        """The factor of sketches, as long as no estimate corrects them."""
        return 1.0 if self.sketch_errors or self.quick else caution(self.sketch.job.device)

    def is_plain(self, choice: Choice) -> bool:
        """True if it neither uses host memory nor rounds more than the method and the user's settings do."""
        return not choice.complexities

    def _picks_after_estimates(self, budgets: list[int]) -> list[Choice | None]:
        for _ in range(_ROUNDS):
            picks = self._picks(budgets)
            new = list(dict.fromkeys(pick for pick in picks if pick is not None and pick not in self.estimates))
            if not new:
                return picks
            # The first estimate corrects the sketch of the others, so it comes alone; and the first of a strategy.
            last = {choice.strategy: choice for choice in new}
            learned = [c for c in new if c.strategy in self.host_errors or c is last[c.strategy]]
            self.estimate(learned if self.estimates else new[-1:])
        return self._picks(budgets, sure=True)

    def _picks(self, budgets: list[int], sure: bool = False) -> list[Choice | None]:
        picks = [self._safe_pick(budgets, sure), *(self._pick(budget, sure) for budget in budgets[1:])]
        for place in range(1, len(picks)):
            lower, pick = picks[place - 1 : place + 1]
            # What costs complexity must be clearly faster, so without this a larger budget could be the slower one.
            if lower is not None and (pick is None or self.relative_time(pick, lower) > 1):
                picks[place] = lower
        return picks

    def relative_time(self, choice: Choice, other: Choice) -> float:
        """The ratio of two choices' steps: by their estimates, which plans show, or else by their sketches."""
        estimates = (self.estimates.get(choice), self.estimates.get(other))
        shown = [estimate and estimate.step_seconds for estimate in estimates]
        seconds, of_other = shown if all(shown) else (self.seconds[choice], self.seconds[other])
        return seconds / of_other

    def _safe_pick(self, budgets: list[int], sure: bool) -> Choice | None:
        def without_host(choice: Choice) -> bool:
            return not choice.offloads

        for condition in (self.is_plain, without_host):
            if choice := self._pick(budgets[0], sure, condition):
                return choice
        return None if self._pick(budgets[-1], sure, without_host) else self._pick(budgets[0], sure)

    def smallest(self) -> Choice | None:
        """The choice that needs the least memory, by estimates of those with the smallest sketches."""
        for _ in range(_LOOKS):
            # Of one peak the choice that is estimated says it for all.
            order = {choice: (self.needs(choice), choice not in self.estimates) for choice in self._traceable()}
            smallest = min(order, key=lambda choice: (*order[choice], self._rank[choice]), default=None)
            if smallest is None or smallest in self.estimates:
                return smallest
            # The sketch may overestimate, so one sample with every layer checkpointed is estimated beside it.
            new = dict.fromkeys((smallest, self.one_sample(smallest.strategy)))
            self.estimate([choice for choice in new if choice not in self.estimates])
        return min((choice for choice in self.estimates if self.estimates[choice]), key=self.needs, default=None)

    def one_sample(self, strategy: str) -> Choice | None:
        """The choice that needs the least memory, with the smallest micro-batch and the most layers checkpointed."""
        return min(
            (choice for choice in self._traceable() if choice.strategy == strategy),
            key=lambda c: (c.micro_batch, -c.checkpointed, self.needs(c)),
            default=None,
        )

    def _traceable(self) -> Iterator[Choice]:
        """The choices, without those that could not be traced."""
        return (choice for choice in self.choices if self.estimates.get(choice, True) is not None)

    def _pick(
        self, budget: int, sure: bool = False, condition: Callable[[Choice], bool] = lambda choice: True
    ) -> Choice | None:
        def may_fit(choice: Choice) -> bool:
            if choice in self.estimates:
                return self.fits(choice, budget)
            confirmed = self._keys(choice)[0] in self.sketch_errors  # an estimate of the same peak leaves no doubt
            fits = not sure and self.needs(choice) <= budget * (1 if confirmed else _OPTIMISM)
            return fits and self._host_has(choice)

        fitting = (choice for choice in filter(condition, self.choices) if may_fit(choice))
        if (fastest := next(fitting, None)) is None:
            return None
        limit = self._rank[fastest] * NEIGHBOURS
        near = itertools.takewhile(lambda choice: self._rank[choice] <= limit, fitting)
        return min((fastest, *near), key=self._price)

    def _price(self, choice: Choice) -> tuple:
        """What a choice costs beside time, the dearest first: rounding and host memory, an engine, features,
        micro-batches, memory."""
        features = (choice.complexities, not choice.engine.plain, choice.levers)
        return (*features, choice.accumulation, self.needs(choice))

    def fits(self, choice: Choice, budget: int) -> bool:
        """True if a choice fits by its estimate, or else by its sketch."""
        if choice not in self.estimates:
            return self.needs(choice) <= budget and self._host_has(choice)
        estimate = self.estimates[choice]
        if estimate is None or resident_bytes(choice, estimate) > budget:
            return False
        return self._host_suffices(choice, estimate.host_bytes)

    def host_bytes(self, choice: Choice) -> int:
        """Bytes of the host: the estimate's, or the sketch's of what is offloaded and what estimates add to it."""
        if estimate := self.estimates.get(choice):
            return estimate.host_bytes
        return self.sketch.host_bytes(choice) + self.host_errors.get(choice.strategy, 0)

    def _host_has(self, choice: Choice) -> bool:
        return self._host_suffices(choice, self.host_bytes(choice))

    def _host_suffices(self, choice: Choice, host_bytes: int) -> bool:
        host = self.host_memory
        return host is None or host_bytes <= host.bytes or (host.assumed and not choice.offloads)

    def estimate(self, new: list[Choice]) -> None:
        """Estimate choices, on all cores, and learn how far the sketch is off.

        Raises:
            InputError: none of several choices can be estimated: it is not the choice.
        """
        if self.quick:
            for choice in new:
                memory, seconds = self.sketch_bytes[choice][0], self.seconds[choice]
                generation = self.cost.rollout(choice).generation or None
                self.estimates[choice] = sketched_estimate(
                    self.sketch, choice, self.build(choice), memory, seconds, generation
                )
            return
        for number, choice in enumerate(new, 1):
            of = f" {number} of {len(new)}" if len(new) > 1 else ""
            self.say(f"estimating{of}: {summarize(choice)}")
        for choice, estimate in zip(new, estimate_jobs(list(map(self.build, new)), on_all_cores), strict=True):
            if isinstance(estimate, InputError):
                self.estimates[choice] = None
                if len(self.estimates) >= _FAILURES and not any(self.estimates.values()):
                    raise estimate
                continue
            self.estimates[choice] = estimate
            constant, moving = self.sketch_bytes[choice]
            off = resident_bytes(choice, estimate) - constant
            self.sketch_errors |= dict.fromkeys(self._keys(choice), (off, max(1, moving)))
            beside = max(0, estimate.host_bytes - self.sketch.host_bytes(choice))
            self.host_errors[choice.strategy] = min(beside, self.host_errors.get(choice.strategy, beside))

    def needs(self, choice: Choice) -> float:
        """Bytes of the device: the estimate, or the sketch corrected by the nearest estimate's error."""
        if estimate := self.estimates.get(choice):
            return resident_bytes(choice, estimate)
        constant, moving = self.sketch_bytes[choice]
        off, held = next((self.sketch_errors[key] for key in self._keys(choice) if key in self.sketch_errors), (0, 1))
        # Half of a sketch's error is taken as constant, half as proportional to the micro-batch's memory.
        grown = (1 + moving / held) / 2
        return constant + off * (grown if off > 0 else min(1.0, grown))

    def _keys(self, choice: Choice) -> list[tuple]:
        """Keys that choices with similar sketch errors share, the most specific first: that of the same peak, to which
        what they differ in adds nothing."""
        kind = "none" if not choice.checkpointed else "all" if choice.checkpointed == 1 else "some"
        levers = (choice.knobs, choice.inputs_offloaded, choice.streamed)
        states = (choice.optim, *(knob.name for knob in choice.on if knob.of_states))
        states += (choice.trl.precomputed, choice.trl.sleeps, choice.shared)
        return [
            (choice.strategy, states, kind, self.sketch_bytes[choice]),
            (choice.strategy, states, levers, kind, choice.checkpointed),
            (choice.strategy, states, levers, kind),
            (choice.strategy, states, "loss_chunk_size" in choice.knobs, kind),
            (choice.strategy, states, kind),
            (choice.strategy, kind),
            (choice.strategy,),
        ]


def resident_bytes(choice: Choice, estimate: Estimate) -> int:
    """Bytes of the device for which there must be room."""
    return estimate.device_bytes - choice.paged * estimate.paged_bytes


def summarize(choice: Choice) -> str:
    """A choice in one line."""
    layers = "all layers" if choice.checkpointed == 1 else f"{choice.checkpointed:.0%} of the layers"
    inputs = ", inputs in host memory" if choice.inputs_offloaded else ""
    parts = (
        (choice.strategy, choice.strategy != "none"),
        (f"micro-batch {choice.micro_batch} × {choice.accumulation}", True),
        (f"{layers} checkpointed{inputs}", choice.checkpointed > 0),
        *((knob.words, True) for knob in choice.on),
        ("weights in host memory", choice.streamed == 1),
        (f"weights of {choice.streamed:.0%} of the layers in host memory", 0 < choice.streamed < 1),
        (f"samples shared by {choice.shared} devices", choice.shared > 1),
        (choice.optim, "8bit" in choice.optim),
    )
    return ", ".join([*(text for text, on in parts if on), *choice.trl.summary()])
