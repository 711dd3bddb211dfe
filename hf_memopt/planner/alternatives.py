"""Alternatives that a plan did not choose: plain settings, other methods, kinds of settings, each with its reason."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_memopt.planner.choices import KNOBS, Choice
from hf_memopt.planner.search import Search, summarize
from hf_memopt.units import gib


@dataclass(frozen=True)
class Rejected:
    """Settings that do not fit or work, or gain nothing, and why.

    Attributes:
        slower: they fit, and are slower than what was chosen; not part of to_dict().
    """

    settings: str
    reason: str
    slower: bool = False

    def to_dict(self) -> dict[str, str]:
        """The settings and the reason as one JSON object."""
        return {"settings": self.settings, "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Other settings beside a profile's.

    Attributes:
        method: full, lora or qlora.
        settings: in one line.
        device_bytes: predicted.
        estimated: by a whole estimate, not a sketch.
        fits: the memory of the profile that it stands beside.
        relative_time: for as many tokens, to the profile's.
        tokens_per_second: of all devices together; None where the device's speed is unknown.
    """

    method: str
    settings: str
    device_bytes: int
    estimated: bool
    fits: bool
    relative_time: float
    tokens_per_second: float | None

    def to_dict(self) -> dict[str, Any]:
        """The alternative as one JSON object."""
        return {
            **vars(self),
            "relative_time": round(self.relative_time, 3),
            "tokens_per_second": self.tokens_per_second and round(self.tokens_per_second, 1),
        }


def plain_alternative(search: Search, profile, memory: int) -> Alternative | None:
    """The preferred settings with every layer checkpointed and without host memory and rounding; of those that do not
    fit, the smallest. None where the profile itself is so, and where the user's settings leave none.

    Args:
        memory: bytes of each device, of which the profile has a share.
    """
    plain = [choice for choice in search.choices if search.is_plain(choice) and choice.checkpointed == 1.0]
    budget = int(memory * profile.share)
    fitting = [choice for choice in plain if search.fits(choice, budget)]
    if not plain or profile.choice in plain:
        return None
    best = fitting[0] if fitting else min(plain, key=search.needs)
    return _alternative(profile.preset.method, search, best, bool(fitting), profile)


def method_alternative(spec, search: Search | None, profile) -> Alternative | None:
    """Another method within a profile's share of the memory: for the profile's own method the profile, for
    another by its sketch what is plain, if anything plain fits. None where nothing fits.

    Args:
        spec: of as many samples a step, as long, as the profile's.
    """
    if search is None:
        return None
    if spec.preset.method == profile.preset.method:
        return _alternative(spec.preset.method, search, profile.choice, True, profile)
    budget = int(spec.memory * profile.share / search.caution)
    best = search.first(budget, search.is_plain) or search.sketched(budget)
    return best and _alternative(spec.preset.method, search, best, True, profile)


def _alternative(method: str, search: Search, choice: Choice, fits: bool, profile) -> Alternative:
    same = method == profile.preset.method  # else for the same step
    relative_time = search.relative_time(choice, profile.choice) if same else search.seconds[choice] / profile.seconds
    return Alternative(
        method=method,
        settings=summarize(choice),
        device_bytes=int(search.needs(choice) * search.caution),
        estimated=bool(search.estimates.get(choice)),
        fits=fits,
        relative_time=relative_time,
        tokens_per_second=profile.tokens_per_second and profile.tokens_per_second / relative_time,
    )


def left_out(search: Search, budget: int, chosen: list[Choice]) -> Iterator[Rejected]:
    """Kinds of settings that are faster than what was chosen, or simpler, and what they would need.

    Args:
        budget: bytes of each device.
    """
    families: dict[str, list[Choice]] = {}
    for choice in (*search.choices, *search.short_of_host):
        for family in _families(choice):
            families.setdefault(family, []).append(choice)
    for family, members in families.items():
        if not any(choice in members for choice in chosen):
            fitting = [choice for choice in members if search.fits(choice, budget)]
            if not fitting:
                yield Rejected(family, _lacking(search, budget, members))
                continue
            best = fitting[0]  # the preferred variant, not the fastest with more features
            fastest = min(chosen, key=search.seconds.__getitem__)
            relative_time = search.seconds[best] / search.seconds[fastest]
            yield Rejected(family, _comparison(relative_time, best, fastest), slower=relative_time >= 1)


def _lacking(search: Search, budget: int, members: list[Choice]) -> str:
    """The memory that settings lack, of the device or else of the host."""
    smallest = min(members, key=search.needs)
    about = "" if search.estimates.get(smallest) else "about "
    if search.needs(smallest) > budget:
        return f"needs at least {about}{gib(int(search.needs(smallest)))}, of {gib(budget)}"
    smallest = min((choice for choice in members if search.needs(choice) <= budget), key=search.host_bytes)
    host = search.host_memory
    return (
        f"needs about {gib(search.host_bytes(smallest))} of host memory for each process, of {gib(host.bytes)} "
        f"({host.source}; --host-memory sets the limit)"
    )


def _comparison(relative_time: float, best: Choice, fastest: Choice) -> str:
    """Explain why settings that fit were left out, though they may be faster."""
    text = f"predicted to take {relative_time:.2f} × the time of the fastest profile"
    if relative_time >= 1:
        return text
    costs = (
        ("depending on host memory", best.offloads and not fastest.offloads),
        ("rounding", best.approximations > fastest.approximations),
    )
    named = " and ".join(cost for cost, paid in costs if paid)
    return f"{text}: too small a gain for {named or 'more features'}"


_FAMILIES = tuple(dict.fromkeys(knob.family for knob in KNOBS if knob.family))


def _families(choice: Choice) -> list[str]:
    if choice.strategy != "none":
        return [choice.strategy + (", samples shared by devices" if choice.shared > 1 else "")]
    families = {knob.family for knob in choice.on} | (
        {"activations in host memory"} if choice.inputs_offloaded else set()
    )
    kept = not choice.checkpointed and not any(knob.group == "activations" for knob in choice.on)
    kinds = (
        ("no memory feature", not choice.levers),
        ("all activations kept", kept),
        *((family, family in families) for family in _FAMILIES),
        ("some layers' weights in host memory", 0 < choice.streamed < 1),
    )
    return [*(name for name, on in kinds if on), *choice.trl.families()]
