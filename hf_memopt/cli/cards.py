"""`hf-memopt plan MODEL --hardware any`: the cards on which a job trains, by memory or by the user's prices."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from hf_memopt.cli.estimate import import_libraries
from hf_memopt.cli.output import print_json, print_table, progress
from hf_memopt.cli.speed_printed import AmountOptions
from hf_memopt.errors import InputError
from hf_memopt.estimator.timing.duration import time_text, two_digits
from hf_memopt.estimator.trl_tasks import TRL_TASKS
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.presets import METHOD_TITLES
from hf_memopt.units import gib

ANY = "any"
_ROWS = {True: 24, False: 10}  # of a table, where it is the only one, and where there is one a method
_SMALLEST = 5  # rows that a shortened table keeps, whatever the cards are
_LEGEND = (
    "fills: the share of a card's memory, at most {limit:.0%}, or {most:.0%} where nothing else fits; ≈: a sketch "
    "from traces that all cards share, else a full estimate; !: so near the limit that the sketch may be wrong",
    "tokens/s: predicted, of all cards of a row; ?: no FLOP/s are published. Speeds of A100s, L40S, "
    "H100s and RTX PRO 6000 alone were compared with real runs",
)
# https://github.com/pytorch/pytorch/issues/172352: since 2.11 only the builds for CUDA 12.6 have older ones.
_OLD = "{cards}: torch's usual builds begin at compute capability 7.5; take one for CUDA 12.6"
# Of 60 to 75 W, and laptops: their published rates are at boost clocks.
_THROTTLED = re.compile(r"t4|l4|a2|a16|.*_sff_.*|.*_laptop|jetson.*")
_POWER = "{cards}: slower where the power limit keeps the card below its boost clock"


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """The options of `plan --hardware any` beside the other options of plan.

    Attributes:
        prices: the file of the user's prices.
        max_price: for an hour of all devices.
        every: list every card and box.
        amount: how much is trained, for hours and cost; `prices` replace its price.
    """

    prices: str | None = None
    max_price: float | None = None
    every: bool = False
    amount: AmountOptions = field(default_factory=AmountOptions)

    def refuse(self) -> None:
        """Refuse the options of plans of one card.

        Raises:
            InputError: it was given.
        """
        options = {"--prices": self.prices, "--max-price": self.max_price, "--all": self.every}
        if names := [name for name, value in options.items() if value]:
            raise InputError(f"{names[0]} compares cards: add --hardware any, or leave it out")


def run_cards(spec: JobSpec, options: CardOptions, as_json: bool) -> int:
    """Print the cards that train the job; 0 if there are any, 1 if not."""
    import_libraries()
    if spec.task in TRL_TASKS:
        raise InputError(f"task={spec.task} is planned for one card: name it with --hardware")
    from hf_memopt.planner.market.cards import choose_card

    answer = choose_card(spec, options.amount.read(), options.prices, options.max_price, options.every, progress)
    if as_json:
        print_json(answer.to_dict())
    else:
        _print_answer(answer, options)
    return 0 if any(answer.fits.values()) else 1


def _print_answer(answer, options: CardOptions) -> None:
    print(f"{answer.model}, {answer.effective_batch_size} samples a step of {answer.seq_len} tokens")
    if answer.prices is not None:
        print(
            f"prices: {answer.prices.origin}, of one card for an hour; below, of all cards of a row: an hour, and "
            f"{_amount(answer)} in total"
        )
    shown = []
    for method, fits in answer.fits.items():
        if not fits:
            print(f"\n{METHOD_TITLES[method]}: fits none of these cards")
            continue
        rows = fits if options.every else _shortened(answer, fits, _ROWS[len(answer.fits) == 1])
        shown += rows
        print_table(
            f"\n{METHOD_TITLES[method]}, {_order(answer)}", *_table(answer, _ordered(answer, rows)), frame=False
        )
        if len(rows) < len(fits):
            print(f"  and {len(fits) - len(rows)} more: --method {method} --all")
        for line in _summary(answer, fits[0], answer.fastest(method)):
            print(f"  {line}")
    if not shown:
        _print_nothing(answer)
        return
    print()
    for line in _notes(answer, shown, options.every):
        print(textwrap.fill(line, 80, subsequent_indent="  "))
    print(
        f"the whole plan of a card:\n  hf-memopt plan {shlex.quote(answer.model)} --hardware {shown[0].name} "
        f"--method {shown[0].method} --seq-len {answer.seq_len} "
        f"--effective-batch-size {answer.effective_batch_size}"
    )


def _order(answer) -> str:
    if answer.prices is not None:
        return "the cheapest first"
    return "the least memory first" if answer.tokens is None else "the fastest first"


def _ordered(answer, fits: list) -> list:
    """The rows by hours, where those are asked for and no prices are; unknown ones last."""
    if answer.prices is not None or answer.tokens is None:
        return fits
    return sorted(fits, key=lambda fit: (fit.hours is None, fit.hours or 0))


def _notes(answer, shown: list, every: bool) -> Iterator[str]:
    """The limits of the table's figures, as sentences."""
    shares = [share for _, share in PLAN_PROFILES.values()]
    yield from (line.format(limit=PLAN_PROFILES["balanced"][1], most=max(shares)) for line in _LEGEND)
    devices = {fit.device.name: fit.device for fit in shown}
    if old := [name for name, device in devices.items() if 0 < device.capability < 7.5]:
        yield _OLD.format(cards=", ".join(old))
    if throttled := [name for name in devices if _THROTTLED.fullmatch(name)]:
        yield _POWER.format(cards=", ".join(throttled))
    if answer.prices is None and not every:
        yield "each card stands for its kind: --all lists every card and box, --prices FILE compares yours by cost"


def _amount(answer) -> str:
    return f"{two_digits((answer.tokens or 10**6) / 1e6)}M tokens"


def _shortened(answer, fits: list, limit: int) -> list:
    """The first rows, and of the others the fastest, and cards that have presets before cards that have none."""
    from hf_memopt.planner.market.boxes import has_preset

    if len(fits) <= limit:
        return fits
    shown = fits[:limit]
    if fits[0].price is None:
        fastest = answer.fastest(fits[0].method) if answer.tokens else None
        by_importance = sorted(
            fits[_SMALLEST:],
            key=lambda fit: (fit is not fastest, bool(fit.choice.offloads), not has_preset(fit.device)),
        )
        chosen = {fit.name for fit in (*fits[:_SMALLEST], *by_importance[: limit - _SMALLEST])}
        shown = [fit for fit in fits if fit.name in chosen]
    return shown


def _table(answer, fits: list) -> tuple[list[str], list[tuple]]:
    """Columns and rows."""
    priced, timed = answer.prices is not None, answer.tokens is not None
    columns = ["card", "fills", "settings", "tokens/s"]
    columns += ["hours"] * timed + (_price_columns(answer.prices.currency) if priced else [])
    rows = []
    for fit in fits:
        mark = ("" if fit.estimated else "≈") + f"{fit.fills:.0%}" + ("!" if fit.is_near and not fit.estimated else "")
        speed = "?" if fit.tokens_per_second is None else two_digits(fit.tokens_per_second)
        hours = ["?" if fit.hours is None else two_digits(fit.hours)] * timed
        costs = [_money(fit.price), "?" if fit.cost is None else _money(fit.cost)] if priced else []
        rows.append((fit.name, mark, _brief(fit.choice), speed, *hours, *costs))
    return columns, rows


def _price_columns(currency: str) -> list[str]:
    return [f"{currency}/h", f"cost, {currency}"] if currency else ["price/h", "cost"]


def _brief(choice) -> str:
    """Settings in as few characters as a table has; --json and `plan` have them in full."""
    parts = (
        (choice.strategy, choice.strategy != "none"),
        (f"{choice.micro_batch}×{choice.accumulation}", True),
        (f"shared by {choice.shared}", choice.shared > 1),
        ("ckpt" if choice.checkpointed == 1 else f"ckpt {choice.checkpointed:.0%}", choice.checkpointed > 0),
        *((knob.short, knob.short and not knob.on_host) for knob in choice.on),
        ("8-bit optim", "8bit" in choice.optim),
        ("activations on host", choice.inputs_offloaded),
        *((knob.short, knob.on_host) for knob in choice.on),
    )
    return ", ".join(text for text, on in parts if on)


def _summary(answer, first, fastest) -> list[str]:
    """The cards to take, in words."""
    if answer.prices is None:
        named = {"smallest": first} | ({"fastest": fastest} if answer.tokens and fastest else {})
        return [f"{name + ':':<9} {fit.name}, {fit.devices} × {fit.device.label}" for name, fit in named.items()]
    lines = [f"cheapest: {first.name}{_costs(answer, first)}"]
    if fastest is not None and fastest.name != first.name:
        lines.append(f"fastest:  {fastest.name}{_costs(answer, fastest)}")
    return lines


def _money(amount: float) -> str:
    return f"{amount:,.2f}" if amount < 100 else f"{amount:,.0f}"


def _costs(answer, fit) -> str:
    if fit.cost is None:
        return ""
    time = "" if fit.hours is None else f" in {time_text(3600 * fit.hours)}"
    return f", {answer.prices.currency}{_money(fit.cost)} for {_amount(answer)}{time}"


def _print_nothing(answer) -> None:
    if answer.least is not None:
        name, needed, settings = answer.least
        print(f"nothing fits; nearest is {name}: each device needs {gib(needed)} ({settings})")
    for fit in answer.instead:
        price = "" if fit.price is None else f", {answer.prices.currency}{_money(fit.price)} an hour"
        print(f"  would fit: {METHOD_TITLES[fit.method]} on {fit.name}{price} ({_brief(fit.choice)})")
    if not answer.instead:
        print("  more than eight devices: hf-memopt plan … --hardware h100_80gbx16")
