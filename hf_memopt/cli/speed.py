"""Predicted speed, time and cost, as the commands print them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from hf_memopt.cli.output import print_table
from hf_memopt.levers.arguments import PLAN_PROFILES


@dataclass(frozen=True, kw_only=True)
class AmountOptions:
    """The amount of training and the price of an hour, as a command line says them (estimator.duration.Amount)."""

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
        from hf_memopt.estimator.duration import Amount, parse_count

        return Amount(
            tokens=None if self.tokens is None else parse_count(self.tokens),
            epochs=self.epochs,
            samples=None if self.samples is None else parse_count(self.samples),
            price=self.price,
        )

    def time_and_cost(self, estimate, seq_len: int, devices: int):
        """The Duration of an estimated job; None where nobody asks, or where the speed is unknown."""
        from hf_memopt.estimator.duration import duration

        tokens = self.read().count_tokens(seq_len)
        if tokens is None or estimate.tokens_per_second is None:
            return None
        return duration(tokens, estimate.tokens_per_second, self.price, devices)


def to_dict(estimate, took) -> dict[str, Any] | None:
    """A Duration as one JSON object, with the share by which it may be off."""
    return took and dataclasses.asdict(took) | {"hours": took.hours, "error": estimate.speed_error}


def print_speed(estimate, took, amount: AmountOptions) -> None:
    """The lines of one estimate; where the speed is unknown its notes say why."""
    from hf_memopt.estimator.duration import predicted_within, time_text, two_digits

    if estimate.step_seconds is not None:
        parts = [f"{time_text(estimate.step_seconds)} a step"]
        if estimate.tokens_per_second is not None:
            parts.insert(0, f"{two_digits(estimate.tokens_per_second)} tokens/s")
        if estimate.mfu is not None:
            parts.append(f"MFU {estimate.mfu:.0%}")
        print(f"speed: {', '.join(parts)}, {predicted_within(estimate.speed_error)}")
    if took is not None:
        cost = (
            ""
            if took.cost is None
            else f", cost in total {two_digits(took.cost)} (at {amount.price:g} a device and hour)"
        )
        what = f"{took.tokens:,} tokens" if took.steps is None else f"{took.steps:,} steps of the largest batch"
        print(f"{what}: {time_text(took.seconds)}{cost}, {predicted_within(estimate.speed_error)}")
    elif amount.asked:
        print("time and cost: unknown, see the note on speed")


def profile_names(group: list) -> str:
    """The profiles with the same settings, in words."""
    names, known = [profile.name for profile in group], list(PLAN_PROFILES)
    if len(names) == 1 or names[-1] != known[-1]:
        return ", ".join(names)
    return "every profile" if names == known else f"{names[0]} and above"


def print_profile_speeds(groups: list[list], amount: AmountOptions, seq_len: int, devices: int) -> None:
    """A row for all profiles with the same settings.

    Args:
        groups: profiles of a plan, by their settings.
    """
    from hf_memopt.estimator.duration import predicted_within, time_text, two_digits

    first = [group[0].estimate for group in groups]
    if any(estimate.tokens_per_second is None for estimate in first):
        if amount.asked:
            print("time and cost: unknown, see the note on speed")
        return
    rows = []
    for group, estimate in zip(groups, first, strict=True):
        mfu = "" if estimate.mfu is None else f"{estimate.mfu:.0%}"
        speeds = [two_digits(estimate.tokens_per_second), mfu, time_text(estimate.step_seconds)]
        if took := amount.time_and_cost(estimate, seq_len, devices):
            speeds += [time_text(took.seconds), *([] if took.cost is None else [two_digits(took.cost)])]
        rows.append((profile_names(group), *speeds))
    heads = ["profile", "tokens/s", "MFU", "a step"]
    if tokens := amount.read().count_tokens(seq_len):
        price = [] if amount.price is None else [f"cost in total at {amount.price:g} a device and hour"]
        heads += [f"{tokens:,} tokens", *price]
    print_table(f"speed, {predicted_within(first[0].speed_error)}", tuple(heads), rows)
