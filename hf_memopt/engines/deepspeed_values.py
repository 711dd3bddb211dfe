"""What DeepSpeed and transformers say of a DeepSpeed configuration: DeepSpeed's own classes are asked, where it is
installed; beside them stand only rows for what they accept and read otherwise."""

import math
import re
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence
from functools import cache
from typing import Any

from hf_memopt.errors import InputError, brief, misspelling, one_line
from hf_memopt.findings import Effect, Finding, Keys, places, refused, value_at, without

# The "auto" that transformers fills in (integrations.deepspeed.HfTrainerDeepSpeedConfig) and accelerate's plugin
# (utils.dataclasses.DeepSpeedPlugin).
_FILLED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping fp16.enabled bf16.enabled
optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr scheduler.params.warmup_num_steps
scheduler.params.total_num_steps zero_optimization.stage zero_optimization.reduce_bucket_size
zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
zero_optimization.stage3_gather_16bit_weights_on_model_save
zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.nvme_path
zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
"""
FILLED = {tuple(name.split(".")) for name in _FILLED.split()}
# accelerate and transformers call .get() on these.
_MAPPINGS = """
zero_optimization zero_optimization.offload_optimizer zero_optimization.offload_param bf16 fp16 aio
optimizer optimizer.params scheduler scheduler.params
"""
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SWITCHES = (("fp16", "enabled"), ("bf16", "enabled"))  # transformers compares them to TrainingArguments
_MOST = 20  # refusals of one file


def check_deepspeed(config: Mapping[str, Any], where: str = "deepspeed") -> Mapping[str, Any]:
    """A configuration that DeepSpeed and transformers can read.

    Raises:
        InputError: names the first value that they cannot.
    """
    for finding in refusals(config):
        raise InputError(f"{where}: {finding.text}")
    return config


def refusals(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Why DeepSpeed, or transformers on the way to it, refuses a configuration."""
    found = [*_not_mappings(config)]
    config = without(config, refused(found))
    found += _wrong_values(config)
    yield from found
    config = without(config, refused(found))
    for _ in range(_MOST):
        findings = _asked(config)
        yield from findings
        if not refused(findings):
            return
        config = without(config, refused(findings))


def _not_mappings(config: Mapping[str, Any]) -> Iterator[Finding]:
    for keys in (tuple(name.split(".")) for name in _MAPPINGS.split()):
        parent = value_at(config, keys[:-1])
        if isinstance(parent, Mapping) and keys[-1] in parent and not isinstance(block := parent[keys[-1]], Mapping):
            if keys == ("aio",) and block is None:
                continue
            instead = ": leave it out" if block is None else ""
            yield Finding(keys, f"{'.'.join(keys)}={brief(block)} must be a mapping{instead}")


def _wrong_values(config: Mapping[str, Any]) -> Iterator[Finding]:
    """What DeepSpeed or transformers computes with or compares, without having asked for its type."""
    for name in (*_COUNTS, "sequence_parallel_size"):
        value = config.get(name, "auto")
        if value not in ("auto", None) and (type(value) is not int or value < 1):
            fraction = type(value) is float and value > 0 and config.get("train_batch_size", "auto") == "auto"
            computed = value is True or fraction
            text = f'{name}={brief(value)} must be a whole number above 0, or "auto"'
            yield Finding((name,), text, Effect.ACCEPTED if computed else Effect.REFUSED)
    stage = value_at(config, ("zero_optimization", "stage"), 0)
    if stage != "auto" and (type(stage) is not int or not 0 <= stage <= 3):
        read = stage in (0, 1, 2, 3, "0", "1", "2", "3")  # by DeepSpeed, and transformers takes it for none
        text = f"zero_optimization.stage={brief(stage)} must be 0, 1, 2 or 3"
        yield Finding(("zero_optimization", "stage"), text, Effect.ACCEPTED if read else Effect.REFUSED)
    for keys in _SWITCHES:
        if isinstance(value := value_at(config, keys), str) and value != "auto":
            yield Finding(keys, f"{'.'.join(keys)}={brief(value)} must be written without quotes")
    clipping = config.get("gradient_clipping", "auto")
    if clipping != "auto" and (type(clipping) not in (int, float) or not 0 <= clipping < math.inf):
        text = f'gradient_clipping={brief(clipping)} must be a number from 0 on, or "auto"'
        yield Finding(("gradient_clipping",), text, Effect.ACCEPTED)
    yield from _wrong_products(config)


def _wrong_products(config: Mapping[str, Any]) -> Iterator[Finding]:
    """A batch that no number of processes makes: DeepSpeed asserts that they multiply."""
    whole, *parts = (config.get(name, "auto") for name in _COUNTS)
    if any(not isinstance(size, int) or size < 1 for size in (whole, *parts) if size not in ("auto", None)):
        return
    parts = [1 if size in ("auto", None) else size for size in parts]
    if isinstance(whole, int) and whole % math.prod(parts):
        yield Finding(
            ("train_batch_size",),
            f"train_batch_size={whole} is no multiple of train_micro_batch_size_per_gpu × gradient_accumulation_steps "
            f"= {parts[0]} × {parts[1]}, and DeepSpeed refuses it on any number of processes: "
            'leave it out, or write "auto"',
        )


def _asked(config: Mapping[str, Any]) -> list[Finding]:
    """DeepSpeed's own refusals; none where it accepts, or is not installed."""
    try:
        from deepspeed.runtime import config as deepspeed
    except ImportError:
        return []
    if _cannot_be_asked():
        return []
    if removed := list(_removed(config, deepspeed)):
        return removed
    if (error := _error(config)) is None:
        return [*_unknown_types(config, deepspeed), *_wrong_aio(config)]
    if hasattr(error, "errors"):  # pydantic's
        return [_refused_field(config, error.title, one) for one in error.errors()]
    return [_refused_otherwise(config, error)]


def _error(config: Mapping[str, Any]) -> Exception | None:
    """What DeepSpeed raises; None where it accepts the configuration."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        # The configuration without what TrainingArguments, the launcher and the card decide.
        started = without(config, [keys for keys in FILLED if value_at(config, keys) == "auto"])
        started = without(started, [(name,) for name in _COUNTS])
        if value_at(started, ("aio", "use_gds")) is True:  # asserts that there is a CUDA device
            started["aio"]["use_gds"] = False
        DeepSpeedConfig({**started, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # it looks into values without asking for their type
        return error
    return None


@cache
def _cannot_be_asked() -> str:
    """Why DeepSpeed gives no answer here: it refuses even a configuration that says nothing."""
    return "" if (error := _error({})) is None else one_line(error)


def _removed(config: Mapping[str, Any], deepspeed) -> Iterator[Finding]:
    """Keys that this DeepSpeed has removed, by its own lists (0.19)."""
    zero = value_at(config, ("zero_optimization",), {})
    for start, block, table in (
        ((), config, getattr(deepspeed, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})),
        (("zero_optimization",), zero, getattr(deepspeed, "_REMOVED_ZERO_CONFIG_KEYS", {})),
    ):
        for key in table.keys() & block.keys():
            place, reason = ".".join((*start, key)), table[key].partition(" See http")[0]
            reason = re.sub(r"A leftover [^.]*\. ?", "", reason).strip().removesuffix(".")
            yield Finding((*start, key), f"{place} is refused by DeepSpeed: {reason}: remove the key")


def _refused_field(config: Mapping[str, Any], title: str, error: Mapping[str, Any]) -> Finding:
    """One of the errors of DeepSpeed's pydantic models."""
    loc = tuple(str(part) for part in error["loc"])
    keys = next((keys for keys, value in places(config) if _ends_in(keys, loc) and value == error["input"]), ())
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not keys:  # a check of several fields
        return _refused_otherwise(config, ValueError(message))
    place = ".".join(keys)
    if error["type"] == "extra_forbidden":
        return Finding(keys, f"unknown key {place}, which DeepSpeed refuses{_instead(keys, _fields(title, loc[:-1]))}")
    return Finding(keys, f"{place}={brief(error['input'])}: {message}")


def _refused_otherwise(config: Mapping[str, Any], error: Exception) -> Finding:
    """Any other error, at the key without which DeepSpeed says something else, first at those that its text names."""
    message = one_line(error)
    words = message.replace("'", " ").split(" ")
    order = sorted(places(config), key=lambda place: (place[0][-1] not in words, isinstance(place[1], Mapping)))
    keys = next((keys for keys, _ in order if message not in str(_error(without(config, [keys])))), ())
    refusal = isinstance(error, AssertionError | ValueError) or type(error).__name__ == "DeepSpeedConfigError"
    said = "refuses the configuration" if refusal else f"cannot read the configuration: {type(error).__name__}"
    value = value_at(config, keys)
    place = f"{'.'.join(keys)}{'' if isinstance(value, Mapping) else f'={brief(value)}'}: " if keys else ""
    return Finding(keys, f"{place}DeepSpeed {said}: {message}")


def _unknown_types(config: Mapping[str, Any], deepspeed) -> Iterator[Finding]:
    """Optimizers and schedulers that deepspeed.initialize() does not find (runtime.engine)."""
    import torch
    from deepspeed.runtime import lr_schedules

    optimizers = [*deepspeed.DEEPSPEED_OPTIMIZERS, *(name for name in dir(torch.optim) if name[0].isupper())]
    schedulers = [*getattr(lr_schedules, "VALID_LR_SCHEDULES", ()), *vars(lr_schedules)]
    schedulers += [name for name in dir(torch.optim.lr_scheduler) if name[0].isupper()]
    for block, known in (("optimizer", optimizers), ("scheduler", schedulers)):
        name = value_at(config, (block, "type"))
        if name is None or name in known or (block == "optimizer" and str(name).lower() in known):
            continue
        close = misspelling(str(name), [*known, "Adam", "AdamW"])
        hint = f": did you mean {close!r}?" if close else ""
        text = f"{block}.type={brief(name)} is no {block} of DeepSpeed or torch{hint}"
        yield Finding((block, "type"), text)


def _wrong_aio(config: Mapping[str, Any]) -> Iterator[Finding]:
    """DeepSpeed asks nothing of these before it computes with them."""
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    for name, default in AIO_DEFAULT_DICT.items():
        value = value_at(config, ("aio", name), default)
        if type(value) is not type(default) or (type(value) is int and value < 1):
            what = "true or false" if isinstance(default, bool) else "a whole number above 0"
            yield Finding(("aio", name), f"aio.{name}={brief(value)} must be {what}", Effect.ACCEPTED)


@cache
def keys_read() -> frozenset[Keys]:
    """Every key that the installed DeepSpeed looks for at the top of a configuration and in blocks without a class.

    Raises:
        ImportError: it cannot be asked.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    if reason := _cannot_be_asked():
        raise ImportError(reason)

    blocks = {name: {} for name in ("aio", "activation_checkpointing", "torch_autocast")}
    types = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    read = ReadKeys({"train_micro_batch_size_per_gpu": 1, **blocks, **types})
    DeepSpeedConfig(read)
    return frozenset(read.log)


@cache
def homes() -> dict[str, Keys]:
    """Where the keys of zero_optimization and of the blocks below it and of aio, activation_checkpointing belong."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    start: Keys = ("zero_optimization",)
    homes = {name: start for name in _names(DeepSpeedZeroConfig)}
    for block in ("offload_optimizer", "offload_param"):
        homes |= {name: (*start, block) for name in _fields("DeepSpeedZeroConfig", (block,)) if name not in homes}
    blocks = ("aio", "activation_checkpointing")
    return homes | {keys[1]: keys[:1] for keys in keys_read() if len(keys) > 1 and keys[0] in blocks}


def _instead(keys: Keys, known: Sequence[str]) -> str:
    """What to do with an unknown key."""
    if close := misspelling(keys[-1], known):
        return f": did you mean {close!r}?"
    home = homes().get(keys[-1])
    return f": it belongs in {'.'.join(home)}" if home and home != keys[:-1] else ": remove it"


@cache
def deprecated_fields() -> dict[str, str]:
    """Old names in zero_optimization that DeepSpeed still reads, and the new ones."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    extras = {name: field.json_schema_extra or {} for name, field in DeepSpeedZeroConfig.model_fields.items()}
    return {name: extra["new_param"] for name, extra in extras.items() if "new_param" in extra}


def _fields(title: str, keys: Keys) -> list[str]:
    """The fields of DeepSpeed's class of that name, or of the class that keys lead to from there."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    kind = next((kind for kind in DeepSpeedConfigModel.__subclasses__() if kind.__name__ == title), None)
    for key in keys:
        fields = getattr(kind, "model_fields", {})
        field = next((field for name, field in fields.items() if key in (name, field.alias)), None)
        annotation = getattr(field, "annotation", None)
        kinds = [annotation, *getattr(annotation, "__args__", ())]
        kind = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return _names(kind)


def _names(kind: Any) -> list[str]:
    fields = getattr(kind, "model_fields", {})
    return [*fields, *(field.alias for field in fields.values() if field.alias)]


def _ends_in(keys: Keys, loc: Keys) -> bool:
    """True if keys lead to pydantic's location, which is of a block, by alias or by name."""
    return len(keys) > 1 and loc != () and keys[-len(loc) :] in (loc, (*loc[:-1], loc[-1].removeprefix("stage3_")))


class ReadKeys(dict):
    """A nested mapping, every part of which remembers.

    Attributes:
        log: the keys that were looked for, in their order, each with the keys that lead to it.
    """

    def __init__(self, content: Mapping[str, Any], keys: tuple = (), log: list[tuple] | None = None) -> None:
        self._keys, self.log = keys, [] if log is None else log
        blocks = {key: value for key, value in content.items() if isinstance(value, Mapping)}
        nested = {key: ReadKeys(block, (*keys, key), self.log) for key, block in blocks.items()}
        super().__init__({**content, **nested})

    def __getitem__(self, key):
        self.log.append((*self._keys, key))
        return super().__getitem__(key)

    def __contains__(self, key) -> bool:
        self.log.append((*self._keys, key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator:
        for key in super().__iter__():
            self.log.append((*self._keys, key))
            yield key

    def get(self, key, default=None):
        self.log.append((*self._keys, key))
        return super().get(key, default)

    def keys(self):
        return KeysView(self)

    def items(self):
        return ItemsView(self)

    def __copy__(self):
        return self
