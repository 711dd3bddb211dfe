"""Predicted speed, time and cost, as the commands print them."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_memopt.cli.output import print_table
from hf_memopt.estimator.timing.duration import (
    Amount,
    duration,
    parse_count,
    predicted_within,
    run_duration,
    time_text,
    two_digits,
)
from hf_memopt.levers.arguments import PLAN_PROFILES


@dataclass(frozen=True, kw_only=True)
class AmountOptions:
    """The amount of training and the price of an hour, as a command line says them (timing.duration.Amount)."""

    tokens: str | None = None
    epochs: float | None = None
    samples: str | None = None
    price: float | None = None

    @property
    def asked(self) -> bool:
        """True if time is asked for."""
        return self.tokens is not None or self.samples is not None

    def read(self):
        """The Amount.

        Raises:
            InputError: the options are no numbers, or say it twice.
        """
        return Amount(
            tokens=None if self.tokens is None else parse_count(self.tokens, "tokens"),
            epochs=self.epochs,
            samples=None if self.samples is None else parse_count(self.samples, "samples"),
            price=self.price,
        )

    def time_and_cost(self, estimate, samples: int, devices: int):
        """The Duration of an estimated job; None where nobody asks, or where the speed is unknown.

        Args:
            samples: of an optimizer step, over all devices. So many take a step each, whatever their tokens are: a
                pair has two answers, a video its frames.
        """
        amount = self.read()
        if (count := amount.count_samples()) is not None and estimate.step_seconds is not None:
            took = run_duration(count / samples, estimate.step_seconds, self.price, devices)
            if estimate.tokens_per_second is None:
                return replace(took, steps=math.ceil(took.steps))
            return replace(took, tokens=round(took.seconds * estimate.tokens_per_second), steps=None)
        if amount.tokens is None or estimate.tokens_per_second is None:
            return None
        return duration(amount.tokens, estimate.tokens_per_second, self.price, devices)

    def in_words(self, took) -> str:
        """What a Duration is of, and its cost."""
        if (count := self.read().count_samples()) is not None:
            what = f"{count:,} samples, all as long as the longest"
        else:
            what = f"{took.tokens:,} tokens" if took.steps is None else f"{took.steps:,} steps of the largest batch"
        price = f" (at {self.price:g} a device and hour)" if self.price is not None else ""
        return what if took.cost is None else f"{what}, cost in total {two_digits(took.cost)}{price}"


def to_dict(estimate, took) -> dict[str, Any] | None:
    """A Duration as one JSON object, with the share by which it may be off."""
    return took and asdict(took) | {"hours": took.hours, "error": estimate.speed_error}


def speed_parts(estimate, step: str) -> list[str]:
    """A known speed: tokens a second, the time of a step, how much of it is generation."""
    parts = [] if estimate.tokens_per_second is None else [f"{two_digits(estimate.tokens_per_second)} tokens/s"]
    parts.append(f"{time_text(estimate.step_seconds)} {step}")
    if estimate.generation_share is not None:
        parts.append(f"{estimate.generation_share:.0%} of it generation")
    return parts


def print_speed(estimate, took, amount: AmountOptions) -> None:
    """The lines of one estimate; where the speed is unknown its notes say why."""
    if estimate.step_seconds is not None:
        parts = speed_parts(estimate, "a step")
        if estimate.mfu is not None:
            parts.append(f"MFU {estimate.mfu:.0%}")
        print(f"speed: {', '.join(parts)}, {predicted_within(estimate.speed_error, estimate.own_runs)}")
    if took is not None:
        print(f"{time_text(took.seconds)} for {amount.in_words(took)}, {predicted_within(estimate.speed_error)}")
    elif amount.asked:
        print("time and cost: unknown, see the note on speed")


def profile_names(group: list) -> str:
    """The profiles with the same settings, in words."""
    names, known = [profile.name for profile in group], list(PLAN_PROFILES)
    if len(names) == 1 or names[-1] != known[-1]:
        return ", ".join(names)
    return "every profile" if names == known else f"{names[0]} and above"


def print_profile_speeds(groups: list[list], amount: AmountOptions, samples: int, devices: int) -> None:
    """A row for all profiles with the same settings.

    Args:
        groups: profiles of a plan, by their settings.
        samples: of an optimizer step.
    """
    first = [group[0].estimate for group in groups]
    if any(estimate.tokens_per_second is None for estimate in first):
        if amount.asked:
            print("time and cost: unknown, see the note on speed")
        return
    rows = []
    for group, estimate in zip(groups, first, strict=True):
        mfu = "" if estimate.mfu is None else f"{estimate.mfu:.0%}"
        speeds = [two_digits(estimate.tokens_per_second), mfu, time_text(estimate.step_seconds)]
        if took := amount.time_and_cost(estimate, samples, devices):
            speeds += [time_text(took.seconds), *([] if took.cost is None else [two_digits(took.cost)])]
        rows.append((profile_names(group), *speeds))
    heads = ["profile", "tokens/s", "MFU", "a step"]
    if took:
        price = [] if amount.price is None else [f"cost in total at {amount.price:g} a device and hour"]
        count = amount.read().count_samples()
        heads += [f"{took.tokens:,} tokens" if count is None else f"{count:,} samples", *price]
    print_table(f"speed, {predicted_within(first[0].speed_error, first[0].own_runs)}", tuple(heads), rows)
