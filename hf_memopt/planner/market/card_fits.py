"""The answer of which_card(): the cards on which a job trains, with their settings and predictions."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.estimator.timing.duration import duration
from hf_memopt.hardware import Hardware
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.market.boxes import box_name
from hf_memopt.planner.market.prices import Prices
from hf_memopt.planner.search import summarize

NEAR = 0.05  # of the limit: what a full estimate may change of a sketch
SHARES = [share for _, share in PLAN_PROFILES.values()]
BALANCED = list(PLAN_PROFILES).index("balanced")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A card, or several of one kind, on which the job trains.

    Attributes:
        device, devices: the card, and how many.
        choice: the settings of the profile `balanced`; of `maximum` where only that fits.
        share: of the device's memory that the profile may fill.
        device_bytes, host_bytes: predicted, for each device.
        estimated: by a full estimate; else by the sketch.
        tokens_per_second: of all devices; None where the card's FLOP/s are not published.
        price: of all devices for an hour.
        tokens: that are trained on, for `hours` and `cost`.
    """

    device: Hardware
    devices: int
    method: str
    choice: Choice
    share: float
    device_bytes: int
    host_bytes: int
    estimated: bool
    tokens_per_second: float | None
    price: float | None = None
    tokens: int | None = None

    @property
    def name(self) -> str:
        """The card or box as `--hardware` takes it."""
        return box_name(self.device, self.devices)

    @property
    def memory(self) -> int:
        """Bytes of all devices, as printed on their boxes."""
        return self.device.nominal_memory * self.devices

    @property
    def fills(self) -> float:
        """The share of the device's memory that is predicted to be used."""
        return self.device_bytes / self.device.memory

    @property
    def is_near(self) -> bool:
        """True if the rest may be as small as a sketch's error, which is large for what goes to the host."""
        return self.fills > self.share * (1 - NEAR) or bool(self.choice.offloads)

    @property
    def hours(self) -> float | None:
        """The hours for all tokens."""
        if self.tokens is None or self.tokens_per_second is None:
            return None
        return duration(self.tokens, self.tokens_per_second).hours

    @property
    def cost(self) -> float | None:
        """The cost of all tokens, by default of a million."""
        if self.price is None or self.tokens_per_second is None:
            return None
        return duration(self.tokens or 10**6, self.tokens_per_second, self.price).cost

    def to_dict(self) -> dict[str, Any]:
        return {
            "hardware": self.name,
            "label": self.device.label,
            "devices": self.devices,
            "method": self.method,
            "settings": summarize(self.choice),
            "micro_batch": self.choice.micro_batch,
            "accumulation": self.choice.accumulation,
            "strategy": self.choice.strategy,
            "profile": "balanced" if self.share == SHARES[BALANCED] else "maximum",
            "device_bytes": self.device_bytes,
            "capacity_bytes": self.device.memory,
            "fills": round(self.fills, 4),
            "near_limit": self.is_near,
            "host_bytes": self.host_bytes,
            "source": "estimate" if self.estimated else "sketch",
            "tokens_per_second": self.tokens_per_second,
            "hours": self.hours,
            "price_per_hour": self.price,
            "cost": self.cost,
        }


@dataclass(frozen=True, kw_only=True)
class CardChoice:
    """The answer of which_card().

    Attributes:
        prices, tokens: as asked.
        fits: by method; the first of each is the answer.
        instead: where nothing fits, what would: a card without a price, a more expensive one, another method.
        least: where nothing fits, the card or box that comes nearest, the bytes that each device needs, the settings.
    """

    model: str
    seq_len: int
    effective_batch_size: int
    prices: Prices | None
    tokens: int | None
    fits: dict[str, list[Fit]]
    instead: list[Fit] = field(default_factory=list)
    least: tuple[str, int, str] | None = None

    def __iter__(self) -> Iterator[Fit]:
        return itertools.chain.from_iterable(self.fits.values())

    def fastest(self, method: str) -> Fit | None:
        """The fastest of the cards with known speeds."""
        timed = [fit for fit in self.fits.get(method, []) if fit.tokens_per_second is not None]
        return max(timed, key=lambda fit: fit.tokens_per_second, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The answer as one JSON object."""
        return {
            "model": self.model,
            "seq_len": self.seq_len,
            "effective_batch_size": self.effective_batch_size,
            "tokens": self.tokens,
            "currency": (self.prices and self.prices.currency) or None,
            "cards": [fit.to_dict() for fit in self],
            "first": {method: fits[0].name for method, fits in self.fits.items() if fits},
            "instead": [fit.to_dict() for fit in self.instead],
            "least": None
            if self.least is None
            else dict(zip(("hardware", "bytes", "settings"), self.least, strict=True)),
        }
