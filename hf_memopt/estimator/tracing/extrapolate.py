"""Two shallow models stand for a deep one: what a step costs grows in a straight line with the number of layers."""

import copy
from collections.abc import Callable
from math import lcm

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.ledger import Peak

_TRACED_WHOLE = 6  # layers; up to this depth the model is traced as it is
FEWEST = {"none": 3, "ddp": 3, "fsdp2": 4, "mesh": 4, "deepspeed": 4}  # layers that are traced, at least, by engine
FEWEST_IN_PARTITIONS = 10  # ZeRO-1 and 2 cut all weights into flat partitions, where embeddings must not dominate
# Settings that make every n-th layer of another kind, and those that say how many come first.
_EVERY = ("decoder_sparse_step", "moe_layer_frequency", "moe_layer_freq", "attn_layer_period", "expert_layer_period")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def layers_of(config) -> int:
    """The number of layers.

    Raises:
        InputError: the configuration has none.
    """
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(depth, int) or depth < 1:
        raise InputError(
            f"model type {config.model_type!r} has no num_hidden_layers: only layered models are estimated"
        )
    return depth


def shallow_depths(config, fewest: int = FEWEST["none"], every: int = 1) -> tuple[int, ...]:
    """The depths to trace: the model's own, or two that are whole periods of its pattern apart from it and each other.

    With whole periods added, the shallow models end in the same kinds of layers as the deep one.

    Args:
        fewest: layers of the shallower one, at least. Engines that gather and reduce while neighbouring layers compute
            have a longer way into their stride.
        every: layers after which a setting of the job repeats, as `every_n_layers` of activation checkpointing.
    """
    depth = layers_of(config)
    text = config.get_text_config()
    if config.is_encoder_decoder and depth != getattr(text, "num_decoder_layers", depth):
        return (depth,)
    prefix, period = _pattern(text, depth)
    period = lcm(period, every)
    least = max(fewest, period) + prefix
    low = next(n for n in range(least, least + period) if (depth - n) % period == 0)
    if depth <= max(_TRACED_WHOLE, low + period):
        return (depth,)
    return low, low + period


def period_of_layers(config) -> int:
    """After how many layers the kinds of layers repeat; 1 where all are alike."""
    return _pattern(config.get_text_config(), layers_of(config))[1]


def _pattern(text, depth: int) -> tuple[int, int]:
    """How many layers come before the pattern of kinds, and after how many it repeats; (0, 1) where all are alike."""
    prefix = max((value for name in _FIRST if isinstance(value := getattr(text, name, 0), int)), default=0)
    found = [value for name in _EVERY if isinstance(value := getattr(text, name, 1), int) and value > 0]
    period = lcm(1, *found)
    for kinds in _per_layer(text, depth).values():
        prefix, period = _joined(kinds, prefix, period)
    return min(prefix, depth), period


def _joined(kinds: list, prefix: int, period: int) -> tuple[int, int]:
    """The smallest prefix, then period, that also explain another list of layer kinds."""
    for first in range(prefix, len(kinds)):
        rest = kinds[first:]
        for length in range(period, len(rest) // 2 + 1, period):
            if all(rest[i] == rest[i - length] for i in range(length, len(rest))):
                return first, length
    return len(kinds), 1


def _per_layer(text, depth: int) -> dict[str, list]:
    """Settings that say something of every layer, such as layer_types."""
    return {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == depth and depth > 1
    }


def with_depth(config, depth: int):
    """A copy of a configuration with fewer layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = layers_of(config)
    for name, kinds in _per_layer(text, before).items():
        setattr(text, name, kinds[:depth])
    for name in ("num_decoder_layers", "encoder_layers", "decoder_layers"):
        if getattr(text, name, None) == before:
            setattr(text, name, depth)
    text.num_hidden_layers = depth
    return config


def at_full_depth(config, peaks_at: Callable[[int], dict[str, Peak]], depths: tuple[int, ...]) -> dict[str, Peak]:
    """Peaks per segment at the model's own depth, from one trace or from two shallow ones."""
    if len(depths) == 1:
        return peaks_at(depths[0])
    low, high = map(peaks_at, depths)
    steps = (layers_of(config) - depths[0]) // (depths[1] - depths[0])
    return {name: _extended(low[name], high[name], steps) for name in low.keys() & high.keys()}


def _extended(low: Peak, high: Peak, steps: int) -> Peak:
    """The line through two peaks, `steps` times their distance beyond the first."""
    by_kind = {
        kind: low.by_kind.get(kind, 0) + (high.by_kind.get(kind, 0) - low.by_kind.get(kind, 0)) * steps
        for kind in low.by_kind.keys() | high.by_kind.keys()
    }
    by_kind = {kind: max(0, size) for kind, size in by_kind.items()}
    return Peak(sum(by_kind.values()), by_kind, max(0, low.host + (high.host - low.host) * steps))
