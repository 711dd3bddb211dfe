"""which_card(): the cards, and boxes of them, on which a job trains, from a few traces for all of them.

A card changes what fits and how fast it is, not what a step allocates. So each method is traced once (full fine-tuning
twice: engines compute with 16-bit weights), every card gets a sketch from these traces, and full estimates are made
only of what decides the answer.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from hf_memopt.errors import InputError
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.spec_job import read_model, sample_length
from hf_memopt.estimator.timing.duration import Amount
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.catalog import catalog
from hf_memopt.hardware.measured import constant
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choice_jobs import baseline_jobs, choice_job, trace_sketch
from hf_memopt.planner.choices import Choice, list_choices
from hf_memopt.planner.market.boxes import all_cards, box_name, boxes, known_flops, typical_cards
from hf_memopt.planner.market.card_fits import BALANCED, NEAR, SHARES, CardChoice, Fit
from hf_memopt.planner.market.prices import Prices, read_prices
from hf_memopt.planner.plan import check_asked
from hf_memopt.planner.search import Search, summarize
from hf_memopt.planner.settle import settle
from hf_memopt.planner.sketch import Sketch
from hf_memopt.presets import METHODS
from hf_memopt.presets.batch import EFFECTIVE_BATCH
from hf_memopt.presets.named_presets import preset_for

TOKENS = 2048  # of a sample, by default: presets differ, and cards are compared on one job
_MOST_ESTIMATES = 6  # full ones; the other cards keep their sketches
_ROUNDS = 3  # of estimates
_FAILURES = 3  # so many cards, and it is not the card
_ABOUT = 1.05  # costs that differ by less are the same: speeds are off by as much
_REFERENCE = "a100_80gb"  # the card whose settings are traced for all: 16 bits, an engine, discrete memory


@dataclass(frozen=True)
class _Candidate:
    """A card or box, a method, and the search over its settings."""

    spec: JobSpec
    search: Search

    @property
    def device(self) -> Hardware:
        return self.spec.preset.hardware

    @property
    def memory(self) -> int:
        """Bytes of all devices, as printed on their boxes."""
        return self.device.nominal_memory * self.spec.preset.processes

    @property
    def least(self) -> Choice:
        """The choice that needs the least memory, without host memory if it can."""
        plain = [choice for choice in self.search.choices if not choice.offloads]
        return min(plain or self.search.choices, key=self.search.needs)

    def fit(self, price: float | None, tokens: int | None) -> Fit | None:
        """The settings that fit the balanced profile's share of the memory, else the largest; None where none do."""
        factor, shares = self.search.caution, (SHARES[BALANCED], SHARES[-1])
        picks = ((self.search.sketched(int(self.spec.memory * share / factor)), share) for share in shares)
        choice, share = next(filter(all, picks), (None, None))
        if choice is None:
            return None
        devices = self.spec.preset.processes
        trained = self.spec.effective_batch_size * self.search.sketch.job.seq_len
        return Fit(
            device=self.device,
            devices=devices,
            method=self.spec.preset.method,
            choice=choice,
            share=share,
            device_bytes=int(self.search.needs(choice) * self.search.caution),
            host_bytes=self.search.host_bytes(choice),
            estimated=self.search.estimates.get(choice) is not None,
            tokens_per_second=trained / self.search.seconds[choice] if known_flops(self.device) else None,
            price=None if price is None else price * devices,
            tokens=tokens,
        )


@dataclass
class _Market:
    """The candidates of a job, each made when it is looked at.

    Attributes:
        refused: why cards that cannot run the job cannot.
    """

    request: JobSpec
    say: Callable[[str], None]
    refused: list[InputError] = field(default_factory=list)
    _sketches: dict[tuple, Sketch] = field(default_factory=dict)
    _sketch_bytes: dict[tuple, dict] = field(default_factory=dict)
    _sketch_errors: dict[tuple, dict] = field(default_factory=dict)
    _groups: dict[tuple, tuple[list[Choice], Job, dict[str, dict]] | None] = field(default_factory=dict)
    _candidates: dict[tuple, _Candidate | None] = field(default_factory=dict)

    @property
    def looked_at(self) -> list[_Candidate]:
        """The candidates that were looked at."""
        return [candidate for candidate in self._candidates.values() if candidate is not None]

    def candidate(self, device: Hardware, devices: int, method: str) -> _Candidate | None:
        """None where the card cannot run the job, whatever its memory."""
        key = (device.name, devices, method)
        if key not in self._candidates:
            try:
                self._candidates[key] = self._build(device, devices, method)
            except InputError as error:  # a setting that this card, or this number of them, does not take
                self._candidates[key] = None
                self.refused.append(error)
                if len(self.refused) >= _FAILURES and not self.looked_at:  # it is not the card
                    raise
        return self._candidates[key]

    def _build(self, device: Hardware, devices: int, method: str) -> _Candidate | None:
        spec = self._spec(device, devices, method)
        if (group := self._group(spec)) is None:
            return None
        choices, job, known = group
        sketch = replace(self._sketch(spec), job=replace(job, device=device))
        search = Search(choices, sketch, partial(choice_job, spec), self.say, host_memory=spec.host_memory, **known)
        return _Candidate(spec, search) if search.choices else None

    def _spec(self, device: Hardware, devices: int, method: str) -> JobSpec:
        preset = replace(preset_for(device, method), processes=devices, machines=1, strategy="none")
        return settle(replace(self.request, hardware=preset), method)

    def _group(self, spec: JobSpec) -> tuple[list[Choice], Job, dict[str, dict]] | None:
        """The choices of all cards with the same software settings, their job, and what all their searches know; None
        without a choice."""
        preset, device = spec.preset, spec.preset.hardware
        irrelevant = ("tf32", "activation_checkpointing", "activation_checkpointing_kwargs")  # the choice has its own
        training = {name: value for name, value in preset.training.items() if name not in irrelevant}
        context, workspace = (constant(f"{name}_bytes", device).value for name in ("context", "workspace"))
        bytes_key = (preset.method, preset.processes, preset.dtype, training.get("optim"), context)
        bytes_key += (self._architecture(device),)
        key = (*bytes_key, device.backend, device.discrete_memory, workspace, repr(sorted(training.items())))
        if key not in self._groups:
            choices = list_choices(spec)
            errors_key = (preset.method, preset.processes, device.backend, device.native_bf16)
            known = {
                "estimates": {},
                "sketch_bytes": self._sketch_bytes.setdefault(bytes_key, {}),
                "sketch_errors": self._sketch_errors.setdefault(errors_key, {}),
            }
            self._groups[key] = (choices, baseline_jobs(spec, choices)[0], known) if choices else None
        return self._groups[key]

    def _architecture(self, device: Hardware) -> str:
        """The device's, where the job names kernels that not every card has; one for all that keep scores of heads."""
        from hf_memopt.estimator.patches.math_attention import takes_groups

        request = self.request
        named = request.attn_implementation or request.training.get("use_liger_kernel")
        quantized = getattr(request.config, "quantization_config", None) is not None
        patterns = request.memory_args.sliding_window or request.memory_args.sparse_block_size
        return (
            device.architecture if named or quantized or patterns else "" if takes_groups(device.capability) else "old"
        )

    def _sketch(self, spec: JobSpec) -> Sketch:
        """The traces of a method: of the reference card's settings, where it takes the job."""
        preset = spec.preset
        engines = preset.processes > 1 and preset.method == "full"
        key = (preset.method, engines, self._architecture(preset.hardware))
        if key not in self._sketches:
            devices = " on several devices" if engines else ""
            self.say(f"tracing {preset.method} training{devices}, with and without activation checkpointing")
            if not key[-1]:
                reference = self._spec(catalog()[_REFERENCE], preset.processes, preset.method)
                spec = reference if list_choices(reference) else spec
            self._sketches[key] = trace_sketch(spec, list_choices(spec))
        return self._sketches[key]


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The cards that are compared, and what they may cost.

    Attributes:
        prices: of cards; None: cards are compared by memory.
        max_price: for an hour of all devices.
        every: every card and box, not the typical ones and of each the best box.
    """

    prices: Prices | None
    max_price: float | None
    every: bool
    tokens: int | None

    def cards(self) -> list[Hardware]:
        if self.prices is not None:
            return [catalog()[name] for name in self.prices.per_hour if catalog()[name].backend != "cpu"]
        return all_cards() if self.every else typical_cards()

    def fits(self, market: _Market, method: str) -> list[Fit]:
        """The cards and boxes that train with a method, the best first."""
        return sorted((fit for device in self.cards() for fit in self._of_card(market, device, method)), key=_order)

    def _of_card(self, market: _Market, device: Hardware, method: str) -> list[Fit]:
        fits, price = [], self.prices and self.prices.per_hour.get(device.name)
        for devices in boxes(device):
            if self.max_price is not None and price is not None and price * devices > self.max_price:
                break
            candidate = market.candidate(device, devices, method)
            if fit := candidate and candidate.fit(price, self.tokens):
                fits.append(fit)
                if self.prices is None and not self.every and not fit.choice.offloads:
                    break  # a larger box would train too, and be no answer to which is the least
        return fits if self.every or not fits else [_best_box(fits)]


def _best_box(fits: list[Fit]) -> Fit:
    """Of the boxes of one card: the least of those that cost about as little as the cheapest, without host memory if
    any does without. That devices speed each other up without loss is a prediction, too."""
    fits = [fit for fit in fits if not fit.choice.offloads] or fits
    best = min(fits, key=_order)
    if best.cost is None:
        return best
    return min((fit for fit in fits if fit.cost <= _ABOUT * best.cost), key=lambda fit: fit.devices)


def _order(fit: Fit) -> tuple:
    """Cheap first, then small, then fast; without host memory before with; unknown speeds last."""
    has_speed = fit.tokens_per_second is not None
    if fit.price is not None:
        return not has_speed, fit.cost or 0, fit.price, fit.hours or -(fit.tokens_per_second or 0)
    return bool(fit.choice.offloads), fit.memory, not has_speed, -(fit.tokens_per_second or 0), fit.name


def which_card(
    model,
    effective_batch_size: int | None = None,
    seq_len: int | None = None,
    method: str = "any",
    prices: str | Prices | None = None,
    max_price: float | None = None,
    every: bool = False,
    tokens: int | None = None,
    epochs: float | None = None,
    samples: int | None = None,
    training: dict | None = None,
    lora: dict | None = None,
    say: Callable[[str], None] = lambda text: None,
    **more,
) -> CardChoice:
    """The cards of the catalog, and boxes of up to eight of a kind, on which a job trains.

    Args:
        model, method, training, lora, say: as for plan(). With method="any" each method has its own list.
        effective_batch_size, seq_len: by default 32 samples of 2048 tokens, within the model's positions.
        prices: the user's prices, or the TOML file with them: then only these cards are compared, by cost.
        max_price: of all devices for an hour.
        every: every card and box; by default the typical cards, each in the least box in which it trains.
        tokens: to be trained on, for hours and cost.
        epochs, samples: instead of tokens: passes (by default one) over so many samples of `seq_len` tokens.
        more: further fields of JobSpec.

    Raises:
        InputError: unknown names, or a job that no card takes.
    """
    if effective_batch_size is not None and effective_batch_size <= 0:
        raise InputError(f"effective_batch_size={effective_batch_size} must be above 0")
    spec = JobSpec(
        model=model,
        effective_batch_size=effective_batch_size,
        seq_len=seq_len,
        method=method,
        training=training or {},
        lora=lora or {},
        **more,
    )
    return choose_card(spec, Amount(tokens=tokens, epochs=epochs, samples=samples), prices, max_price, every, say)


def choose_card(
    spec: JobSpec,
    amount: Amount,
    prices: str | Prices | None,
    max_price: float | None,
    every: bool,
    say: Callable[[str], None],
) -> CardChoice:
    """which_card() of a job."""
    prices = read_prices(prices) if isinstance(prices, str) else prices
    limits = {"max_price": max_price, "tokens": amount.tokens, "epochs": amount.epochs, "samples": amount.samples}
    for name, value in limits.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name}={value!r} must be above 0, and finite")
    if max_price is not None and prices is None:
        raise InputError(f"max_price={max_price:g} needs prices: say what the cards cost, with --prices FILE")
    check_asked(spec)
    spec = read_model(spec)
    spec = replace(
        spec,
        effective_batch_size=spec.effective_batch_size or EFFECTIVE_BATCH,
        seq_len=sample_length(spec, TOKENS),
    )
    tokens = amount.count_tokens(spec.seq_len)
    market = _Market(spec, say)
    comparison = _Comparison(prices=prices, max_price=max_price, every=every, tokens=tokens)
    methods = METHODS if spec.method == "any" else (spec.method,)
    fits = _after_estimates(market, comparison, methods)
    if market.refused and not market.looked_at:
        raise market.refused[0]
    nothing = not any(fits.values())
    nearest = _least(market, methods[-1]) if nothing else None  # of the cards that were asked for, before others
    return CardChoice(
        model=str(spec.model),
        seq_len=spec.seq_len,
        effective_batch_size=spec.effective_batch_size,
        prices=prices,
        tokens=tokens,
        fits=fits,
        instead=list(_instead(market, comparison, methods)) if nothing else [],
        least=nearest,
    )


def _after_estimates(market: _Market, comparison: _Comparison, methods: tuple[str, ...]) -> dict[str, list[Fit]]:
    """The cards by method, after full estimates of the first of each method and of what is near its limit."""
    count = 0
    for _ in range(_ROUNDS):
        fits = {method: comparison.fits(market, method) for method in methods}
        doubtful = {(id(box.search.estimates), choice): box for box, choice in _doubtful(market, fits)}
        doubtful = list(doubtful.items())[: _MOST_ESTIMATES - count]
        if not doubtful:
            return fits
        for (_, choice), candidate in doubtful:
            candidate.search.estimate([choice])
        count += len(doubtful)
    return {method: comparison.fits(market, method) for method in methods}


def _doubtful(market: _Market, fits: dict[str, list[Fit]]) -> Iterator[tuple["_Candidate", Choice]]:
    """Settings that a full estimate may move over the limit, or under it; the most important first."""
    first = {method: rows[0] for method, rows in fits.items() if rows}
    quick = [fit for rows in fits.values() for fit in rows if fit.choice.engine.plain]
    kinds: dict[tuple, Fit] = {}  # one of each that no estimate corrects yet
    for fit in quick:
        if not market.candidate(fit.device, fit.devices, fit.method).search.sketch_errors:
            kinds.setdefault((fit.method, fit.device.backend, fit.device.native_bf16), fit)
    for fit in (*first.values(), *kinds.values(), *(fit for fit in quick if fit.is_near)):
        if not fit.estimated:
            yield market.candidate(fit.device, fit.devices, fit.method), fit.choice
    for candidate in market.looked_at:
        smallest, best = candidate.least, first.get(candidate.spec.preset.method)
        over = candidate.search.needs(smallest) * candidate.search.caution / candidate.spec.memory_budget
        if not 1 < over <= 1 + NEAR or not smallest.engine.plain or smallest in candidate.search.estimates:
            continue
        if best is None or candidate.memory < best.memory:  # it may be the answer
            yield candidate, smallest


def _instead(market: _Market, comparison: _Comparison, methods: tuple[str, ...]) -> Iterator[Fit]:
    """The best where nothing fits: of the same methods whatever it costs, and of the other methods."""
    anything = replace(comparison, prices=None, max_price=None, every=False)
    other_methods = tuple(method for method in METHODS if method not in methods)
    for wider, of_methods in (
        (replace(comparison, max_price=None), methods),
        (anything, methods),
        (comparison, other_methods),
        (anything, other_methods),
    ):
        for method in of_methods:
            if rows := wider.fits(market, method):
                yield rows[0]


def _least(market: _Market, method: str) -> tuple[str, int, str] | None:
    """The box that comes nearest, of those that were looked at, the bytes of each device, and the settings."""
    candidates = [box for box in market.looked_at if box.spec.preset.method == method]
    if not candidates:
        return None
    nearest = min(candidates, key=lambda box: box.search.needs(box.least) / box.spec.memory_budget)
    name = box_name(nearest.device, nearest.spec.preset.processes)
    return name, int(nearest.search.needs(nearest.least)), summarize(nearest.least)
