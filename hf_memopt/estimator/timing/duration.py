"""The time and the cost of so many tokens at a predicted speed."""

import math
from dataclasses import dataclass

from hf_memopt.errors import InputError, brief
from hf_memopt.units import read_number


@dataclass(frozen=True)
class Duration:
    """Training of so many tokens, or steps.

    Attributes:
        tokens: over all devices; None where steps are counted.
        seconds: predicted.
        cost: in the currency of the price; None without a price.
    """

    tokens: int | None
    seconds: float
    cost: float | None = None
    steps: int | None = None

    @property
    def hours(self) -> float:
        return self.seconds / 3600


def duration(tokens: int, tokens_per_second: float, price: float | None = None, devices: int = 1) -> Duration:
    """The time that training takes.

    Args:
        tokens_per_second: of all devices together.
        price: of one device for an hour, as clouds quote it.
        devices: that are paid for.
    """
    seconds = tokens / tokens_per_second
    return Duration(tokens, seconds, _cost(seconds, price, devices))


def run_duration(
    steps: float | None, step_seconds: float | None, price: float | None = None, devices: int = 1
) -> Duration | None:
    """The time of a script's own steps; None where their number or the speed is unknown."""
    if steps is None or step_seconds is None:
        return None
    seconds = steps * step_seconds
    return Duration(None, seconds, _cost(seconds, price, devices), steps)


def _cost(seconds: float, price: float | None, devices: int) -> float | None:
    return None if price is None else seconds / 3600 * devices * price


def training_steps(trainer, world_size: int) -> int | None:
    """The optimizer steps of a Trainer, as set_initial_training_values (transformers 5.23) counts them; None for data
    without a length."""
    args, data = trainer.args, trainer.train_dataset
    if args.max_steps > 0:
        return args.max_steps
    if not hasattr(data, "__len__"):
        return None
    samples = args.per_device_train_batch_size * world_size
    batches = len(data) // samples if args.dataloader_drop_last else math.ceil(len(data) / samples)
    steps = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    return math.ceil(steps * args.num_train_epochs)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """An amount of training: tokens, or epochs over samples; neither where nobody asks.

    Attributes:
        epochs: passes over the samples; 1 where only `samples` is set.
        samples: of the data set.
        price: of one device for an hour.

    Raises:
        InputError: values that say it twice, or not at all.
    """

    tokens: int | None = None
    epochs: float | None = None
    samples: int | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and (self.epochs is not None or self.samples is not None):
            raise InputError(f"tokens={self.tokens} and epochs over samples say the same: leave one out")
        if self.epochs is not None and self.samples is None:
            raise InputError(f"epochs={self.epochs:g} needs the number of samples: add --samples, or use --tokens")
        if self.price is not None and self.tokens is None and self.samples is None:
            raise InputError(f"price={self.price:g} needs an amount of training: add --tokens or --samples")

    def count_samples(self) -> int | None:
        """Samples to train on, over all epochs; None where tokens are counted."""
        return self.samples and math.ceil(self.samples * (1 if self.epochs is None else self.epochs))

    def count_tokens(self, seq_len: int) -> int | None:
        """Tokens to train on, every sample being `seq_len` long; None where nobody asks."""
        return self.tokens if self.samples is None else self.count_samples() * seq_len


def parse_count(text: str, of: str) -> int:
    """A number of tokens or samples as people write it: 10M, 2.5B, 300k, 1e9, 1_000_000.

    Args:
        of: tokens or samples.

    Raises:
        InputError: it is not one, or less than 1.
    """
    number = read_number(text, of=of) or 0.0
    if not 1 <= number < 1e18:
        raise InputError(f"{brief(text)} must be a number such as 300k, 10M, 2.5B or 1000000")
    return round(number)


def time_text(seconds: float) -> str:
    """Two digits of it in the unit that people would use: 40 s, 12 min, 5.3 h, 3.1 days."""
    for unit, size, limit in (("ms", 1e-3, 1), ("s", 1, 90), ("min", 60, 90 * 60), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            return f"{two_digits(seconds / size)} {unit}"
    return f"{two_digits(seconds / 86400)} days"


def two_digits(value: float) -> str:
    """A predicted figure with as many digits as it is worth."""
    return f"{float(f'{value:.2g}'):,.10g}"


def predicted_within(error: float | None, runs=None) -> str:
    """The words for a figure that is predicted with an error; None where no run was compared.

    Args:
        runs: the OwnRuns that scale it.
    """
    within = "predicted, not compared with any run" if error is None else f"predicted ±{error:.0%}"
    return f"{within}, from {runs.counted}" if runs else within
