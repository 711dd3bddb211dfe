"""The longest sequence that fits a device, with one memory feature after another."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.levers.change import CHUNK
from hf_memopt.levers.features.mlp_tiles import MLP_TILES
from hf_memopt.levers.refusals import refusals
from hf_memopt.planner.choice_jobs import choice_job
from hf_memopt.planner.choices import Choice, list_choices
from hf_memopt.planner.lower_bound import weights_alone

_STEP = 256  # tokens: an answer is a multiple
_MOST = 2**20  # tokens, of models that name no limit
_FIRST = 4096  # tokens of the first estimate: with fewer, what does not grow with them may decide the peak
_TRIES = 6
_FULL = 0.98  # of the budget: what fills so much of it is long enough


@dataclass(frozen=True)
class Length:
    """The longest sequence with some memory features.

    Attributes:
        settings: the features in words.
        seq_len: tokens of a sample; 0 where not even `_STEP` fit.
        limited_by: device, host (memory), or model (its positions).
        estimate: of that length; where nothing fits, of the shortest that was tried.
    """

    settings: str
    seq_len: int
    limited_by: str
    estimate: Estimate


def longest_sequences(spec: JobSpec, say: Callable[[str], None] = lambda text: None) -> Iterator[Length]:
    """For each memory feature on top of those before, the longest sequence with which one sample fits the device.

    Args:
        spec: of one device, whose length is varied; 90 % of its memory are filled.
        say: called with what is being estimated.

    Raises:
        InputError: several devices, a model without lengths, or no combination of settings works.
    """
    if spec.preset.processes > 1:
        raise InputError("--seq-len max is found for one device: leave the number of devices out of --hardware")
    if spec.video is not None:
        raise InputError("--seq-len max is for text: the most frames of a video are found by --frames max")
    if (alone := weights_alone(spec)) and alone[0] > spec.memory_budget:
        return
    first = _FIRST
    for settings, longer, choice in _features(spec):
        search = _LengthSearch(longer, choice, lambda text, settings=settings: say(f"{settings}: {text}"), first)
        try:
            found = search.longest()
        except InputError:
            if longer.memory_args == spec.memory_args:
                raise
            continue  # a model whose MLPs are all routed experts has none to tile
        first = 2 * found or first
        yield found_length(settings, found, search)


def found_length(settings: str, tokens: int, search: "_LengthSearch") -> Length:
    """A search's answer, and what keeps it from being longer."""
    limited_by = "model" if tokens >= search.most else search.limits.get(min(search.limits, default=0), "device")
    return Length(settings, tokens, limited_by, search.tried[tokens or min(search.tried)])


def _features(spec: JobSpec) -> Iterator[tuple[str, JobSpec, Choice]]:
    """In words, the spec and the choice of each feature, together with those before; refused ones are left out."""
    spec = dataclasses.replace(spec, seq_len=_FIRST)  # of which losses in chunks are a choice
    choices = {one for one in list_choices(spec) if one.micro_batch == 1 and one.checkpointed == 1}
    if not choices:
        raise InputError("--seq-len max: activation checkpointing of every layer is not among the choices")
    # A preset's own optimizer of 8 bits is in all of them.
    settings, choice = "all layers checkpointed", min(choices, key=lambda one: (one.complexities, one.chunked_loss))
    yield settings, spec, choice
    for word, change in (
        ("loss in chunks", {"chunked_loss": True}),
        ("layers' inputs in host memory", {"inputs_offloaded": True}),
    ):
        changed = dataclasses.replace(choice, **change)
        if changed in choices:
            settings, choice = f"{settings}, {word}", changed
            yield settings, spec, choice
    memory_args = dataclasses.replace(spec.memory_args, **MLP_TILES.settings)
    tiled = dataclasses.replace(spec, memory_args=memory_args)
    configured = choice.configured(spec.preset)
    fields = {**configured.training, **choice.fields(configured, spec.training)}
    if spec.memory_args.mlp_tile_size is None and not any(refusals(memory_args, fields, choice.engine)):
        yield f"{settings}, MLP in tiles of {CHUNK} tokens", tiled, choice


@dataclass
class _LengthSearch:
    """The longest sequence of one choice.

    Attributes:
        first: tokens of the first estimate.
        tried: tokens -> their estimate.
        limits: tokens that do not fit -> what they exceed.
    """

    spec: JobSpec
    choice: Choice
    say: Callable[[str], None]
    first: int
    tried: dict[int, Estimate] = field(default_factory=dict)
    limits: dict[int, str] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Tokens that the model has positions for."""
        positions = getattr(self.spec.config.get_text_config(), "max_position_embeddings", None)
        return min(_MOST, positions or _MOST)

    def longest(self) -> int:
        """Memory grows about linearly with tokens: each guess is where a line through two estimates ends."""
        guess = self.first
        for _ in range(_TRIES):
            fitting = [tokens for tokens in self.tried if tokens not in self.limits]
            low, high = max(fitting, default=0), min(self.limits, default=self.most + _STEP) - _STEP
            guess = self.most if guess >= self.most else max(_STEP, guess // _STEP * _STEP)
            guess = min(max(guess, low + _STEP), max(high, _STEP))
            if guess <= low or guess in self.tried or (low and max(self._fills(low)) > _FULL):
                break
            self._try(guess)
            guess = self._guess()
        return max((tokens for tokens in self.tried if tokens not in self.limits), default=0)

    def _try(self, tokens: int) -> None:
        self.say(f"estimate {len(self.tried) + 1} of at most {_TRIES}, {tokens} tokens")
        job = choice_job(dataclasses.replace(self.spec, seq_len=tokens), self.choice)
        self.tried[tokens] = estimate_job(job, on_all_cores)
        device, host = self._fills(tokens)
        if max(device, host) > 1:
            self.limits[tokens] = "device" if device >= host else "host"

    def _fills(self, tokens: int) -> tuple[float, float]:
        """Shares of the device's and the host's budget that so many tokens take."""
        estimate, host = self.tried[tokens], self.spec.host_memory
        of_host = estimate.host_bytes / host.bytes if host and self.choice.offloads else 0.0
        return estimate.device_bytes / (self.spec.memory * PLAN_PROFILES["balanced"][1]), of_host

    def _guess(self) -> int:
        fills = {tokens: self._fills(tokens) for tokens in self.tried}
        near = sorted(fills, key=lambda tokens: abs(max(fills[tokens]) - 1))[:2]
        if len(near) == 1:
            return near[0] * 4 if max(fills[near[0]]) <= 1 else near[0] // 4
        ends = (_ends(near, [fills[tokens][kind] for tokens in near]) for kind in (0, 1))
        return int(min(ends))


def _ends(tokens: list[int], fills: list[float]) -> float:
    """Where the line through two (tokens, share of a budget) reaches all of it."""
    slope = (fills[1] - fills[0]) / (tokens[1] - tokens[0])
    return tokens[0] + (1 - fills[0]) / slope if slope > 0 else _MOST
