"""The ladder of a search: for every rung the fastest choice that is estimated to fit its share of the device."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.cost import Cost
from hf_memopt.planner.sketch import Sketch

_OPTIMISM = 1.01  # a sketch may be so much above the room and its choice still be tried
_ROUNDS = 8
_FAILURES = 3
_LOOKS = 3  # for the choice that needs least


@dataclass
class Search:
    """Choices of one job, their sketch, and the estimates made so far.

    Attributes:
        host_memory: bytes that a process may use on the host; None where that is not known.
        found: choice -> its estimate; None where the job cannot be traced.
    """

    choices: list[Choice]
    sketch: Sketch
    build: Callable[[Choice], Job]
    say: Callable[[str], None]
    host_memory: int | None = None
    found: dict[Choice, Estimate | None] = field(default_factory=dict)
    _off: dict[tuple, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cost = Cost(self.sketch)
        self.seconds = {choice: cost.step(choice) for choice in self.choices}
        self._rank = {choice: cost.rank(choice) for choice in self.choices}
        self.choices = sorted(self.choices, key=self._rank.__getitem__)
        if self.host_memory is not None:
            self.choices = [one for one in self.choices if self.sketch.host_bytes(one) <= self.host_memory]
        self._sketched = {choice: self.sketch.device_bytes(choice) for choice in self.choices}

    def ladder(self, rooms: Iterable[int]) -> list[Choice | None]:
        """For every number of bytes the fastest choice that fits into it; None where none does."""
        rooms = list(rooms)
        picks = self._settled(rooms)
        if None in picks:  # the sketch may have thought too ill of what needs least
            self.smallest()
            picks = self._settled(rooms)
        return picks

    def _settled(self, rooms: list[int]) -> list[Choice | None]:
        for _ in range(_ROUNDS):
            picks = [self._pick(room) for room in rooms]
            new = list(dict.fromkeys(pick for pick in picks if pick is not None and pick not in self.found))
            if not new:
                return picks
            # What the first estimate says of the sketch may move the others; an engine's takes long.
            self.estimate(new if new[0].engine in ("none", "ddp") or self.found else new[-1:])
        return [self._pick(room, sure=True) for room in rooms]

    def smallest(self) -> Choice | None:
        """The choice that needs least, by an estimate of those that look smallest."""
        for _ in range(_LOOKS):
            known = [choice for choice in self.choices if self.found.get(choice, True) is not None]
            if not known:
                return None
            least = min(known, key=lambda choice: (self.needs(choice), self._rank[choice]))
            if least in self.found:
                return least
            # What a sketch gets wrong, it may get wrong here: beside it one sample with every layer recomputed.
            small = [choice for choice in known if choice.strategy == least.strategy]
            sure = min(small, key=lambda choice: (choice.micro_batch, -choice.recomputed, self.needs(choice)))
            self.estimate([choice for choice in dict.fromkeys((least, sure)) if choice not in self.found])
        return min((one for one in self.found if self.found[one]), key=self.needs, default=None)

    def _pick(self, room: int, sure: bool = False) -> Choice | None:
        for choice in self.choices:
            if choice in self.found:
                if self._fits(self.found[choice], room):
                    return choice
            elif not sure and self.needs(choice) <= room * _OPTIMISM:
                return choice
        return None

    def _fits(self, found: Estimate | None, room: int) -> bool:
        enough = self.host_memory is None or (found is not None and found.host_bytes <= self.host_memory)
        return found is not None and found.device_bytes <= room and enough

    def estimate(self, new: list[Choice]) -> None:
        """Estimate choices, on all cores, and learn how far the sketch is off.

        Raises:
            InputError: none of several choices can be estimated: it is not the choice.
        """
        for choice in new:
            self.say(f"estimating {summarize(choice)}")
        jobs = [self.build(choice) for choice in new]
        for choice, found in zip(new, estimate_jobs(jobs, on_all_cores), strict=True):
            self.found[choice] = None if isinstance(found, InputError) else found
            if isinstance(found, InputError) and len(self.found) >= _FAILURES and not any(self.found.values()):
                raise found
            if self.found[choice] is not None:
                whole, moving = self._sketched[choice]
                self._off |= dict.fromkeys(_keys(choice), (found.device_bytes - whole, max(1, moving)))

    def needs(self, choice: Choice) -> float:
        """Bytes: estimated where that was done, else sketched and corrected by the nearest estimate's difference."""
        if found := self.found.get(choice):
            return found.device_bytes
        whole, moving = self._sketched[choice]
        off, held = next((self._off[key] for key in _keys(choice) if key in self._off), (0, 1))
        # What a sketch misses is half a constant and half in proportion to what a micro-batch holds.
        grown = (1 + moving / held) / 2
        return whole + off * (grown if off > 0 else min(1.0, grown))


def _keys(choice: Choice) -> list[tuple]:
    """What choices have in common whose sketches are off alike, the most alike first."""
    kind = "none" if not choice.recomputed else "all" if choice.recomputed == 1 else "some"
    levers = (choice.chunked_loss, choice.compressed, choice.activations_offloaded, choice.inputs_offloaded)
    states = (choice.optim, choice.optimizer_offloaded)
    return [
        (choice.strategy, states, levers, kind, choice.recomputed),
        (choice.strategy, states, levers, kind),
        (choice.strategy, states, choice.chunked_loss, kind),
        (choice.strategy, states, kind),
        (choice.strategy, kind),
        (choice.strategy,),
    ]


def summarize(choice: Choice) -> str:
    """A choice in a few words."""
    words = [f"micro-batch {choice.micro_batch} × {choice.accumulation}"]
    if choice.strategy != "none":
        words.insert(0, choice.strategy)
    share = choice.recomputed
    if share:
        layers = "all layers" if share == 1 else f"{share:.0%} of the layers"
        words.append(f"{layers} recomputed" + (", inputs in host memory" if choice.inputs_offloaded else ""))
    words += [
        text
        for text, on in (
            ("loss in chunks", choice.chunked_loss),
            ("8-bit activations", choice.compressed),
            ("activations in host memory", choice.activations_offloaded),
            ("optimizer in host memory", choice.optimizer_offloaded),
        )
        if on
    ]
    if "8bit" in choice.optim:
        words.append(choice.optim)
    return ", ".join(words)
