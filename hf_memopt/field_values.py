"""Check that values fit the types and bounds of a dataclass's fields: one check of all settings that users give.

Dataclasses check nothing themselves: transformers' and peft's meet a wrong value long after it was given, or never.
"""

import contextlib
import math
import os
import re
import types
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_memopt.errors import InputError, brief, choose
from hf_memopt.files import parse_json
from hf_memopt.other_names import plain_word
from hf_memopt.units import GIB, MIB, read_bytes, read_number

Hints = Mapping[str, Any]


@dataclass(frozen=True)
class Bounds:
    """The numbers that a field takes.

    Attributes:
        minimum, maximum: of the field.
        open: `minimum` itself is too small.
        instead: what to write for the meaning that a number outside is given elsewhere.
    """

    minimum: float
    maximum: float = math.inf
    open: bool = False
    instead: str = ""

    def hold(self, value: float) -> bool:
        """True if a number lies within."""
        return value <= self.maximum and (value > self.minimum if self.open else value >= self.minimum)

    def describe(self, value: float) -> str:
        """Describe the numbers that lie within."""
        if self.maximum == 1:
            text = f"lie between {self.minimum:g} and 1"
        elif value > self.maximum:
            text = f"be at most {self.maximum}"
        else:
            text = f"be {'above' if self.open else 'at least'} {self.minimum:g}"
        return f"{text} ({self.instead})" if self.instead else text


_POSITIVE = Bounds(0, open=True)
_COUNT = Bounds(1)
_NOT_NEGATIVE = Bounds(0)
_SHARE = Bounds(0, 1)
_BATCH = Bounds(1, 2**31 - 1)  # torch's samplers and DeepSpeed's batch sizes are far below; divisors are still found
_SEED = Bounds(0, 2**32 - 1)  # numpy.random.seed, which transformers.set_seed calls

# By name: no two of the dataclasses that are checked give a name two meanings.
BOUNDS = {
    # TrainingArguments
    "per_device_train_batch_size": _BATCH,
    "per_device_eval_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "num_train_epochs": _POSITIVE,
    "max_steps": Bounds(-1, 2**62, instead="-1 trains num_train_epochs"),
    "learning_rate": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": _NOT_NEGATIVE,
    "max_grad_norm": Bounds(0, instead="0 clips nothing"),
    "label_smoothing_factor": _SHARE,
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "torch_empty_cache_steps": _COUNT,
    "logging_steps": Bounds(0, instead="logging_strategy no logs nothing"),
    "eval_steps": Bounds(0, instead="eval_strategy no evaluates nothing"),
    "eval_delay": _NOT_NEGATIVE,
    "eval_accumulation_steps": _COUNT,
    "save_steps": Bounds(0, open=True, instead="save_strategy no saves nothing"),
    "save_total_limit": Bounds(0, instead="0 keeps all"),
    "seed": _SEED,
    "data_seed": _SEED,
    "dataloader_num_workers": Bounds(0, 1024),  # each is a process
    "dataloader_prefetch_factor": _COUNT,
    "ddp_bucket_cap_mb": _COUNT,
    "ddp_timeout": Bounds(1, 10**9),  # seconds, which datetime.timedelta holds
    "local_rank": Bounds(-1),
    # the recipes' own
    "effective_batch_size": _BATCH,
    "held_out": _NOT_NEGATIVE,
    "max_length": Bounds(2),
    "tp_size": _COUNT,
    "fsdp_size": _COUNT,
    "shuffle_buffer_size": Bounds(1, 10**9),
    "samples": _NOT_NEGATIVE,
    "max_frames": _POSITIVE,
    "video_fps": _POSITIVE,
    "max_pixels_per_frame": _POSITIVE,
    "max_video_tokens": _POSITIVE,
    "max_download_mib": _POSITIVE,
    "frame_cache_gib": _POSITIVE,
    "max_bad_videos": _NOT_NEGATIVE,
    "answer_tokens": _COUNT,
    # LoraConfig and BitsAndBytesConfig
    "r": Bounds(1, 2**20),
    "lora_alpha": _POSITIVE,
    "lora_dropout": _SHARE,
    "qalora_group_size": _COUNT,
    "llm_int8_threshold": _NOT_NEGATIVE,
}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}
_LENGTH = re.compile(r"length|_len\b|tokens|positions|(?:chunk|tile|block)_size")  # whose k is 1024
_SIZES = {"_bytes": 1, "_mib": MIB, "_gib": GIB}
_LARGEST = 2**63 - 1  # what torch, numpy and Arrow hold


# TrainingArguments (transformers 5.23) takes more than these annotations say: its __post_init__ itself sets fsdp=True,
# and makes an AcceleratorConfig of a dict.
WIDER = {"fsdp": bool | str | list[str] | None, "accelerator_config": dict | str | None}


@cache
def hints_of(kind: type) -> Hints:
    """The annotations of a dataclass's fields, resolved."""
    hints = get_type_hints(kind)
    return {item.name: _hint(item, hints[item.name]) for item in fields(kind) if item.init}


def _hint(item: Field, annotation: Any) -> Any:
    """A field's type; of one with choices for the command line (transformers' log_level), these."""
    if choices := item.metadata.get("choices"):
        return Literal[tuple(choices)]
    if item.name == "loss_type" and annotation == list[str]:  # trl 1.16, DPOConfig.__post_init__ takes one as well
        return str | list[str]
    return WIDER.get(item.name, annotation)


def fit(hints: Hints, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values as their fields take them.

    YAML reads `1e-4` as a text, and a name such as 2024 as a number: both are what the field wants.

    Args:
        hints: name -> type. Names without one pass.
        where: begins an error's message.

    Raises:
        InputError: names the field, its value and what it takes.
    """
    fitted = {name: _converted(name, hints.get(name, Any), value) for name, value in values.items()}
    for name, value in fitted.items():
        check_value(name, hints.get(name, Any), value, where)
    return fitted


def check_value(name: str, hint: Any, value: Any, where: str = "") -> None:
    """Raise where a value is not of a field's type, or outside its bounds.

    Raises:
        InputError: names the field, its value and what it takes.
    """
    setting = f"{where}{name}={brief(value)}"
    if (values := _enumerated(hint)) and isinstance(value, str) and value not in values:
        raise choose(name, value, values)
    if not _accepts(hint, value):
        quotes = "; YAML reads an unquoted no, off or yes as one" if isinstance(value, bool) else ""
        raise InputError(f"{setting} must be {_described(hint)}{_named(value, hint)}{quotes}")
    if isinstance(value, bool) or not isinstance(value, Real):
        return
    if (isinstance(value, Integral) and abs(value) > _LARGEST) or not math.isfinite(value):
        raise InputError(f"{setting} must be a finite number of at most 64 bits")
    if name in BOUNDS and not BOUNDS[name].hold(value):
        raise InputError(f"{setting} must {BOUNDS[name].describe(value)}")


def _enumerated(hint: Any) -> list[str]:
    """The values of transformers' enumerations in a union with texts, of which it refuses the others late or never."""
    kinds = [part for part in get_args(hint) if isinstance(part, type) and issubclass(part, Enum)]
    return [str(one.value) for kind in kinds if kind.__module__.startswith("transformers.") for one in kind]


def _named(value: Any, hint: Any) -> str:
    """The name that YAML or Python has for the type of a value that is no plain text or number; nothing where the
    field takes some of that type."""
    names = {bool: "true or false", list: "a list", dict: "a mapping", type(None): "nothing"}
    return f", not {names[type(value)]}" if names.get(type(value), "") not in _described(hint) else ""


def _converted(name: str, hint: Any, value: Any) -> Any:
    if value is False and "no" in (choices := _choices(hint)):  # YAML's no
        return "no"
    if value in ("true", "false") and hint is not Any and _accepts(hint, value == "true"):
        return value == "true"
    if not _accepts(hint, value) and _accepts(hint, True):  # transformers.hf_argparser.string_to_bool
        value = {"1": True, "y": True, "t": True, "0": False, "n": False, "f": False}.get(str(value).lower(), value)
    if isinstance(value, str) and hint is not Any:
        content = json_value(value)
        value = content if isinstance(content, (list, dict)) and _accepts(hint, type(content)()) else value
    if isinstance(value, str) and not _accepts(hint, value):
        for kind in (int, float):
            if _accepts(hint, kind()) and (number := read_field(name, kind, value)) is not None:
                return number
    if isinstance(value, str):
        choices = [choice for choice in _choices(hint) if isinstance(choice, str)]
        same = [choice for choice in choices if plain_word(choice) == plain_word(value)]
        return same[0] if len(same) == 1 and value not in choices else value
    if type(value) is int and abs(value) <= _LARGEST and _accepts(hint, "") and not _accepts(hint, value):
        return str(value)
    return value


def json_value(text: str) -> Any:
    """The list or mapping that a text is, as JSON; of any other the text."""
    with contextlib.suppress(ValueError):
        return parse_json(text) if text[:1] in ("[", "{") else text
    return text


def read_field(name: str, kind: type, text: str) -> int | float | None:
    """The number of a text, in the unit that people write for a field: 2k are 2,048 tokens, and 2,000 of all else.

    None of a text that is no number."""
    try:
        return kind(text)
    except ValueError:
        unit = next((unit for suffix, unit in _SIZES.items() if name.endswith(suffix)), None)
        number = unit and (read_bytes(text) or 0) / unit
        number = number or read_number(text, 1024 if _LENGTH.search(name) else 1000, of=name)
        return None if number is None or kind(number) != number else kind(number)


def _choices(hint: Any) -> list[Any]:
    """The values of a type that has a few, or of a union with one."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return list(inner)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [part.value for part in hint]
    return [choice for part in inner for choice in _choices(part)] if inner else []


def _accepts(hint: Any, value: Any) -> bool:
    """True if a value is of a type; a whole number is a number, true and false are not."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_accepts(part, value) for part in inner)
    if origin is Literal:
        # peft writes a pattern among its names: 'pissa_niter_[number of iters]'.
        patterns = any("[" in str(part) for part in inner)
        return any(type(value) is type(part) and (patterns or value == part) for part in inner)
    if hint in (None, type(None)):
        return value is None
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)  # numpy's numbers are these too
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str | os.PathLike)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return isinstance(value, hint | str)  # which of them, the dataclass itself checks
    return _accepts_container(origin or hint, inner, value)


def _accepts_container(kind: Any, inner: tuple, value: Any) -> bool:
    if kind in (list, tuple):
        items = [part for part in inner if part is not Ellipsis]
        each = items[0] if items and len(set(items)) == 1 else Any
        return isinstance(value, list | tuple) and all(_accepts(each, item) for item in value)
    if kind is dict:
        key, item = inner or (Any, Any)
        return isinstance(value, Mapping) and all(_accepts(key, k) and _accepts(item, v) for k, v in value.items())
    return isinstance(value, kind) if isinstance(kind, type) else True


def _described(hint: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_described(part) for part in inner if part is not type(None))) or "none"
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(part.value) for part in hint)}"
    if origin in (list, tuple):
        return f"a list of {_described(inner[0]).removeprefix('a ')}s" if inner else "a list"
    return _WORDS.get(origin or hint) or f"a {getattr(hint, '__name__', hint)}"
