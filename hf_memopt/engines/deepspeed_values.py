"""Whether the values of a DeepSpeed configuration are what DeepSpeed reads: its own classes are asked, where it is
installed."""

import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from hf_memopt.errors import InputError, brief, one_line

Found = Iterator[tuple[tuple[str, ...], str]]  # keys to what is at fault, and what to say of it

# Blocks that transformers, accelerate or this package look into, and DeepSpeed's class for each.
_BLOCKS: dict[tuple[str, ...], str | None] = {
    ("zero_optimization",): "zero.config:DeepSpeedZeroConfig",
    ("zero_optimization", "offload_optimizer"): "zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig",
    ("zero_optimization", "offload_param"): "zero.offload_config:DeepSpeedZeroOffloadParamConfig",
    ("bf16",): "precision_config:DeepSpeedBF16Config",
    ("fp16",): "precision_config:DeepSpeedFP16Config",
    ("optimizer",): None,
    ("optimizer", "params"): None,
    ("scheduler",): None,
    ("scheduler", "params"): None,
}
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_deepspeed(config: Mapping[str, Any], where: str = "deepspeed") -> Mapping[str, Any]:
    """A configuration whose values can be read.

    Raises:
        InputError: names the first value that cannot.
    """
    for _, said in wrong_values(config):
        raise InputError(f"{where}: {said}")
    return config


def wrong_values(config: Mapping[str, Any]) -> Found:
    """The values that DeepSpeed, or transformers on the way to it, cannot read."""
    found = [one for keys in _BLOCKS for one in _not_a_mapping(config, keys)]
    found += _wrong_counts(config)
    stage = 0 if found else config.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:  # transformers compares it to numbers
        found.append((("zero_optimization", "stage"), f"zero_optimization.stage={brief(stage)} must be 0, 1, 2 or 3"))
    try:
        classes = block_classes()
    except ImportError:  # a job under it says so itself
        yield from found
        return
    for keys, kind in classes.items():
        if isinstance(block := _block(config, keys), Mapping):
            found += [one for one in _wrong_fields(keys, block, kind) if one[0] not in {where for where, _ in found}]
    yield from found or _wrong_elsewhere(config)


def block_classes() -> dict[tuple[str, ...], type]:
    """The pydantic models that DeepSpeed reads blocks by, by the keys that lead to them.

    Raises:
        ImportError: DeepSpeed cannot be used.
    """
    classes = {}
    for keys, place in _BLOCKS.items():
        if place:
            module, _, name = place.partition(":")
            classes[keys] = getattr(import_module(f"deepspeed.runtime.{module}"), name)
    return classes


def _block(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    block: Any = config
    for key in keys:
        block = block.get(key) if isinstance(block, Mapping) else None
    return block


def _not_a_mapping(config: Mapping[str, Any], keys: tuple[str, ...]) -> Found:
    parent = config if len(keys) == 1 else _block(config, keys[:-1])
    # accelerate calls .get() on null.
    if isinstance(parent, Mapping) and keys[-1] in parent and not isinstance(block := parent[keys[-1]], Mapping):
        instead = ": leave it out" if block is None else ""
        yield keys, f"{'.'.join(keys)}={brief(block)} must be a mapping{instead}"


def _wrong_counts(config: Mapping[str, Any]) -> Found:
    for name in _COUNTS:
        value = config.get(name, "auto")
        if value not in ("auto", None) and (type(value) is not int or value < 1):
            yield (name,), f'{name}={brief(value)} must be a whole number above 0, or "auto"'


def _wrong_fields(keys: tuple[str, ...], block: Mapping[str, Any], kind) -> Found:
    """Values of one block that its class refuses, or reads as numbers where transformers sees texts or true."""
    from pydantic import ValidationError

    known = {field.alias or name: name for name, field in kind.model_fields.items()}
    known |= {name: name for name in kind.model_fields}
    # "auto" is filled by transformers; nested blocks come by themselves.
    given = {
        key: value for key, value in block.items() if key in known and value != "auto" and (*keys, key) not in _BLOCKS
    }
    try:
        parsed = kind(**given)
    except ValidationError as error:
        for one in error.errors():
            name = str(one["loc"][0]) if one["loc"] else ""
            place = f"{'.'.join((*keys, name))}={brief(one['input'])}: " if name else ""
            yield (*keys, name), f"{place}{one['msg']}"
        return
    except Exception as error:  # its own checks compare values before they are known to be numbers
        yield keys, f"{'.'.join(keys)}: {one_line(error)}"
        return
    for key, value in given.items():
        read = getattr(parsed, known[key], value)  # deprecated names are taken off it
        if isinstance(value, bool | str) and isinstance(read, int | float) and type(read) is not type(value):
            what = "written without quotes" if isinstance(value, str) else "a number, not true or false"
            yield (*keys, key), f"{'.'.join((*keys, key))}={brief(value)} must be {what}"


def _wrong_elsewhere(config: Mapping[str, Any]) -> Found:
    """What DeepSpeed's whole configuration refuses; one sentence, of what it meets first.

    Of clipping and aio it asks nothing before it computes with them.
    """
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    clipping = config.get("gradient_clipping", "auto")
    if clipping != "auto" and (type(clipping) not in (int, float) or not 0 <= clipping < math.inf):
        yield ("gradient_clipping",), f'gradient_clipping={brief(clipping)} must be a number from 0 on, or "auto"'
    aio = config.get("aio")
    if not isinstance(aio, Mapping | None):
        yield ("aio",), f"aio={brief(aio)} must be a mapping"
    for name, default in AIO_DEFAULT_DICT.items() if isinstance(aio, Mapping) else ():
        value = aio.get(name, default)
        if type(value) is not type(default) or (type(value) is int and value < 1):
            what = "true or false" if isinstance(default, bool) else "a whole number above 0"
            yield ("aio", name), f"aio.{name}={brief(value)} must be {what}"
    # The aio block has been looked at, and asserts that GDS has a CUDA device here.
    filled = {name: value for name, value in _without_auto(config).items() if name not in (*_COUNTS, "aio")}
    try:
        DeepSpeedConfig({**filled, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # it looks into values without asking for their type
        yield (), f"DeepSpeed cannot read the configuration: {type(error).__name__}: {one_line(error)}"


def _without_auto(value: Any) -> Any:
    """A configuration without what transformers fills in."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_auto(one) for key, one in value.items() if one != "auto"}
