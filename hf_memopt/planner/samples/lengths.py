"""The longest sequence that fits a device, with one memory feature after another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hf_memopt.errors import InputError
from hf_memopt.estimator.result import Estimate
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.levers.change import CHUNK
from hf_memopt.levers.facts import Facts
from hf_memopt.levers.features.mlp_tiles import MLP_TILES
from hf_memopt.planner.choice_jobs import choice_job
from hf_memopt.planner.choices import Choice, list_choices
from hf_memopt.planner.first_fit import TRIES, FirstFit
from hf_memopt.planner.streamed_weights import excessive_weights

_STEP = 256  # tokens: an answer is a multiple
_MOST = 2**20  # tokens, of models that name no limit
_FIRST = 4096  # tokens of the first estimate: with fewer, what does not grow with them may decide the peak
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
    if excessive_weights(spec):
        return
    first = _FIRST
    for settings, longer, choice in _features(spec):
        search = _search(longer, choice, lambda text, settings=settings: say(f"{settings}: {text}"), first)
        try:
            tokens = search.find() or 0
        except InputError:
            if longer.memory_args == spec.memory_args:
                raise
            continue  # a model whose MLPs are all routed experts has none to tile
        first = 2 * tokens or first
        yield Length(settings, tokens, _limited_by(search, tokens), search.estimates[tokens or min(search.estimates)])


def _search(spec: JobSpec, choice: Choice, say: Callable[[str], None], first: int) -> FirstFit:
    """The search for the longest sequence of a choice.

    Args:
        first: tokens of the first estimate.
    """
    host = spec.host_memory if choice.offloads else None
    positions = getattr(spec.config.get_text_config(), "max_position_embeddings", None)
    longest = min(_MOST, positions or _MOST)
    search = FirstFit(
        candidates=[longest, *range((longest - 1) // _STEP * _STEP, 0, -_STEP)],
        tokens=lambda tokens: tokens,
        build=lambda tokens: choice_job(replace(spec, seq_len=tokens), choice),
        used=lambda estimate: (estimate.device_bytes, estimate.host_bytes if host else 0),
        limits=(spec.memory * PLAN_PROFILES["balanced"][1], host.bytes if host else 1),
        say=lambda tokens: say(f"estimate {len(search.estimates) + 1} of at most {TRIES}, {tokens} tokens"),
        first=max(first, _STEP),
        guess=lambda tokens, estimate: 4 * tokens if search.fits(estimate) else tokens // 4,
        min_share=_FULL,
    )
    return search


def _limited_by(search: FirstFit, tokens: int) -> str:
    """The limit that keeps the longest sequence from being longer."""
    if tokens == search.candidates[0]:
        return "model"
    too_long = [length for length in search.estimates if not search.fits(search.estimates[length])]
    device, host = search.shares(search.estimates[min(too_long)]) if too_long else (1, 0)
    return "device" if device >= host else "host"


def _features(spec: JobSpec) -> Iterator[tuple[str, JobSpec, Choice]]:
    """In words, the spec and the choice of each feature, together with those before; refused ones are left out."""
    spec = replace(spec, seq_len=_FIRST)  # of which losses in chunks are a choice
    choices = {choice for choice in list_choices(spec) if choice.micro_batch == 1 and choice.checkpointed == 1}
    if not choices:
        raise InputError("--seq-len max: activation checkpointing of every layer is not among the choices")
    # A preset's own optimizer of 8 bits is in all of them.
    settings, choice = "all layers checkpointed", min(choices, key=lambda c: (c.complexities, len(c.knobs)))
    yield settings, spec, choice
    for word, change in (
        ("loss in chunks", {"knobs": choice.knobs | {"loss_chunk_size"}}),
        ("layers' inputs in host memory", {"inputs_offloaded": True}),
    ):
        changed = replace(choice, **change)
        if changed in choices:
            settings, choice = f"{settings}, {word}", changed
            yield settings, spec, choice
    memory_args = replace(spec.memory_args, **MLP_TILES.settings)
    configured = choice.configured(spec.preset)
    fields = {**configured.training, **choice.fields(configured, spec.training)}
    refused = Facts.of_settings(memory_args, fields, choice.engine).feature_refusals()
    if spec.memory_args.mlp_tile_size is None and not any(refused):
        yield f"{settings}, MLP in tiles of {CHUNK} tokens", replace(spec, memory_args=memory_args), choice
