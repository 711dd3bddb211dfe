"""A deep model's peaks from two shallow ones: what a step needs grows linearly with the number of layers."""

import copy
from collections.abc import Iterator, Sequence
from math import lcm

from hf_memopt.engines import NO_ENGINE
from hf_memopt.errors import as_input_error
from hf_memopt.estimator.accounting.ledger import STACK, Moment, Peak, highest

_TRACED_WHOLE = 6  # layers; models up to this depth are not made shallower
# Fields of transformers' configurations that make every n-th layer of another kind, and those that say how many come
# before the first such.
_EVERY = (
    *("decoder_sparse_step", "moe_layer_frequency", "moe_layer_freq", "attn_layer_period", "expert_layer_period"),
    *("moe_layer_interval", "interleave_moe_layer_step"),
)
_LISTED = ("mlp_only_layers", "moe_layers")  # which list the layers of a kind
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def read_config(model):
    """A model's configuration: its own, that of its first part that has one, or else an empty one."""
    from transformers import PretrainedConfig

    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if isinstance(config, PretrainedConfig)), None) or PretrainedConfig()


def count_layers(config) -> int:
    """The number of layers; 1 where no one number decides how deep the model is, which is then traced as it is:
    convolutions in stages, several transformers in a row."""
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    return depth if isinstance(depth, int) and depth > 0 else 1


def shallow_depths(config, fewest: int = NO_ENGINE.fewest_layers, every: int = 1) -> tuple[int, ...]:
    """The depths to trace: the model's own, or two that are whole periods of its pattern apart from it and each other.

    With whole periods added, the shallow models end in the same kinds of layers as the deep one.

    Args:
        fewest: layers of the shallower model, at least.
        every: layers after which a setting of the job repeats, such as `every_n_layers` of activation checkpointing.
    """
    depth = count_layers(config)
    text = config.get_text_config()
    if config.is_encoder_decoder and depth != getattr(text, "num_decoder_layers", depth):
        return (depth,)
    prefix, period = _pattern(text, depth)
    period = lcm(period, every)
    smallest = max(fewest, period) + prefix
    low = next(n for n in range(smallest, smallest + period) if (depth - n) % period == 0)
    return (depth,) if depth <= max(_TRACED_WHOLE, low + period) else (low, low + period)


def layer_period(config) -> int:
    """After how many layers the kinds of layers repeat; 1 where all are alike."""
    return _pattern(config.get_text_config(), count_layers(config))[1]


def _pattern(text, depth: int) -> tuple[int, int]:
    """Count the layers that precede the pattern of layer kinds, and the pattern's; (0, 1) where all are alike."""
    prefix = max((value for name in _FIRST if isinstance(value := getattr(text, name, 0), int)), default=0)
    periods = [value for name in _EVERY if isinstance(value := getattr(text, name, 1), int) and value > 0]
    period = lcm(1, *periods)
    listed = [value for name in _LISTED if isinstance(value := getattr(text, name, None), list)]
    members = [[layer in each for layer in range(depth)] for each in listed]
    for kinds in [*_per_layer(text, depth).values(), *members]:
        prefix, period = _extend_pattern(kinds, prefix, period)
    return min(prefix, depth), period


def _extend_pattern(kinds: list, prefix: int, period: int) -> tuple[int, int]:
    """The smallest prefix, then the smallest period, with which a list of layer kinds repeats, too."""
    for first in range(prefix, len(kinds)):
        pattern = kinds[first:]
        for length in range(period, len(pattern) // 2 + 1, period):
            if all(pattern[i] == pattern[i - length] for i in range(length, len(pattern))):
                return first, length
    return len(kinds), 1


def _per_layer(text, depth: int) -> dict[str, list]:
    """Fields with a value for every layer, such as layer_types."""
    return {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == depth and depth > 1
    }


def with_depth(config, depth: int):
    """A copy of a configuration with fewer layers.

    Raises:
        InputError: the configuration's class does not let its number of layers be set.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = count_layers(config)
    if depth == before:
        return config
    for name, kinds in _per_layer(text, before).items():
        setattr(text, name, kinds[:depth])
    for name in ("num_decoder_layers", "encoder_layers", "decoder_layers"):
        if getattr(text, name, None) == before:
            setattr(text, name, depth)
    with as_input_error(f"model type {config.model_type!r}", NotImplementedError):  # Funnel has blocks of layers
        text.num_hidden_layers = depth
    return config


def extrapolate_peaks(
    config, depths: Sequence[int], moments: Sequence[dict[Moment, Peak]], by_layer: bool = True, unlike: int = 0
) -> dict[str, Peak]:
    """Peaks per segment at the model's own depth: of every moment's line through both depths, the highest. A line
    through the peaks of two moments would be neither's.

    Args:
        depths: the model's own, or two shallow ones.
        moments: Moment -> Peak at each depth.
        by_layer: each run of a phase, and each layer in it, is a moment of its own. Not where buckets fill across
            layers and groups of weights follow each other in more runs of a deeper model, as DeepSpeed's do.
        unlike: the first layers, in whose backward pass less is held than in that of those above (Job.unlike_layers).
    """
    if len(depths) == 1:
        return highest((moment.segment, peak) for moment, peak in moments[0].items())
    # Those above layers of another kind fetch less ahead, too.
    prefix = max(unlike - 1, 0) + _pattern(config.get_text_config(), count_layers(config))[0]
    low, high = (
        highest(_placed(by_moment, depth, depths[0], prefix, by_layer))
        for by_moment, depth in zip(moments, depths, strict=True)
    )
    steps = (count_layers(config) - depths[0]) // (depths[1] - depths[0])
    # In the order of the trace, not of a set: of segments with equal peaks the first decides the breakdown.
    return highest((place[0], _extrapolate(low[place], high[place], steps)) for place in low if place in high)


def _placed(
    moments: dict[Moment, Peak], depth: int, lowest: int, prefix: int, by_layer: bool
) -> Iterator[tuple[tuple, Peak]]:
    """Peaks with a name that the same moment has at another depth. A layer's is its number as far as the shallower
    model has it, and how far it is from the last one, behind the first ones of their own kind: what all layers hold
    rises or falls from one to the next, so one of those nearest to the ends has the most.

    Args:
        lowest: layers of the shallower model.
        prefix: layers that come before the pattern of layer kinds. The one above them is not counted from the last:
            its backward pass ends in the second forward pass of the layer below, which is of another kind.
    """
    for (segment, run, layer), peak in moments.items():
        if not by_layer or layer is None:
            yield ((segment, run) if by_layer else (segment,)), peak
            continue
        stack, number = divmod(layer, STACK)
        from_last = depth - 1 - number
        if number < lowest - 1:
            yield (segment, run, stack, "from first", number), peak
        if lowest - 1 - from_last > prefix:
            yield (segment, run, stack, "from last", from_last), peak


def _extrapolate(low: Peak, high: Peak, steps: int) -> Peak:
    """The point `steps` times the distance from `low` to `high` beyond `low`."""
    by_kind = {
        kind: max(0, low.by_kind.get(kind, 0) + (high.by_kind.get(kind, 0) - low.by_kind.get(kind, 0)) * steps)
        for kind in low.by_kind.keys() | high.by_kind.keys()
    }
    host, paged = (
        max(0, before + (after - before) * steps) for before, after in ((low.host, high.host), (low.paged, high.paged))
    )
    return Peak(sum(by_kind.values()), by_kind, host, paged)
