"""A recipe's command line, as far as its words tell: judged before the libraries are imported that it trains with."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hf_memopt.data.sources import local_path
from hf_memopt.errors import InputError, accepted, brief, choose
from hf_memopt.estimator.architectures import read_name
from hf_memopt.field_values import hints_of, read_field
from hf_memopt.hub_names import hub_name
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.presets import METHODS, preset_by_name
from hf_memopt.stack.declared import declared_hints
from hf_memopt.stack.vocabulary import declared_arguments


def check_words(own: str, kind: str, argv: list[str] | None = None) -> None:
    """Refuse names that no argument has, and values that are not of an argument's kind or name nothing.

    Args:
        own: the class of the recipe's own arguments.
        kind: TrainingArguments, or TRL's class.
        argv: without the program's name; by default sys.argv[1:].

    Raises:
        InputError: as recipe.arguments.parse() and what reads its values raise it, seconds later.
    """
    known, adapter = known_arguments(own, kind), declared_hints("LoraConfig")
    if not known:  # written otherwise in this version: parse() judges
        return
    pairs = list(_pairs(sys.argv[1:] if argv is None else argv))
    for name, _ in pairs:
        section, dot, key = name.partition(".")
        if dot and section in ("lora", "quantization"):
            if section == "lora" and adapter and key not in adapter:
                raise choose("key of lora", key, adapter)
        elif name not in known and name.removeprefix("no_") not in known:
            raise choose("argument", name, known)
    for name, value in pairs:
        if value is not None:
            _check_value(name, known.get(name), value)


def known_arguments(own: str, kind: str) -> dict[str, Any]:
    """The arguments of a recipe, with their types; empty where they cannot be read without an import."""
    if not (fields := declared_arguments(kind)):
        return {}
    return {**fields, **hints_of(MemoryArguments), **declared_hints(own), "rung": str, "help": bool}


def _pairs(argv: list[str]) -> Iterator[tuple[str, str | None]]:
    """Each argument's name and its first value."""
    for word, following in pairwise([*argv, "--"]):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            yield name.replace("-", "_"), value if equals else None if following.startswith("--") else following


def _check_value(name: str, hint, value: str) -> None:
    if hint in (int, float) and read_field(name, hint, value) is None:
        raise InputError(f"argument --{name}: invalid {hint.__name__} value: {brief(value)}")
    if name == "method":
        accepted(name, value, METHODS)
    if name == "preset" and value.lower() != "auto":
        preset_by_name(value)
    if name in ("model_name_or_path", "config_name"):
        read_name(value)
    if name == "dataset_name":
        local_path(hub_name(value))
