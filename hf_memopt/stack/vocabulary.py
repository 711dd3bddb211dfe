"""What transformers renamed: fields of TrainingArguments, how a model checkpoints activations, its cache.

The package itself speaks as the newest version does. What comes in may have an old name; what goes out (arguments that
are made, commands and files that are written) has the installed version's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_memopt.errors import InputError, brief
from hf_memopt.field_values import hints_of
from hf_memopt.stack.declared import declared_hints
from hf_memopt.stack.versions import has, stack_has


@dataclass(frozen=True)
class Renamed:
    """A field that has another name since a version of transformers.

    Attributes:
        since: the first version with the new name.
        to_new: the new field's value for the old one's; None where the old one asks for nothing.
        to_old: the old field's value for the new one's; None where the old version has the new field, too, for it.
        kind: of the new field's values, where it differs from the old one's.
        unset: the new field's value that asks for nothing.
    """

    new: str
    old: str
    since: str
    to_new: Callable[[Any], Any] = lambda value: value
    to_old: Callable[[Any], Any] = lambda value: value
    kind: Any = None
    unset: Any = None


RENAMED = (
    Renamed("activation_checkpointing", "gradient_checkpointing", "5.23"),
    Renamed("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "5.23"),
    Renamed(
        "train_sampling_strategy",
        "group_by_length",
        "5.2",
        to_new=lambda on: "group_by_length" if on else None,
        to_old={"group_by_length": True, "random": False}.get,
        kind=str,
        unset="random",
    ),
    Renamed(  # below 1 the new one is a share, as the old one was
        "warmup_steps",
        "warmup_ratio",
        "5.0",
        to_new=lambda share: share or None,
        to_old=lambda steps: steps if 0 < steps < 1 else None,
        kind=float,
        unset=0,
    ),
)


def newest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by the newest version's names.

    Raises:
        InputError: an old name and its new one differ.
    """
    renamed = dict(fields)
    for row in RENAMED:
        old = renamed.pop(row.old, None)
        value = None if old is None else row.to_new(old)
        if value is None:
            continue
        if renamed.get(row.new, value) not in (value, row.unset):
            raise InputError(
                f"{row.old}={brief(old)} is {row.new}'s old name, and {row.new}={brief(fields[row.new])}: leave one "
                "of the two out"
            )
        renamed[row.new] = value
    return renamed


def written(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by the names of the version that answers are for."""
    return spelled(fields, stack_has)


def spelled(fields: Mapping[str, Any], has: Callable[[str, str], bool] = has) -> dict[str, Any]:
    """Fields by the installed version's names."""
    renamed = dict(fields)
    for row in RENAMED:
        if row.new not in renamed or has("transformers", row.since):
            continue
        if (old := row.to_old(renamed[row.new])) is not None:
            del renamed[row.new]
            renamed[row.old] = old
    return renamed


def argument_hints(kind: type) -> dict[str, Any]:
    """The types of a class of TrainingArguments' fields, by their newest names beside the installed version's."""
    hints = dict(hints_of(kind))
    for row in RENAMED:
        if row.old in hints and not has("transformers", row.since):
            hints[row.new] = row.kind or hints[row.old]
    return hints


def declared_arguments(name: str) -> dict[str, Any]:
    """argument_hints() of a class by its name, without an import; empty where its source cannot be read. A renamed
    field's names are both there, whichever the installed version has."""
    hints = declared_hints(name)
    return {**{row.new: row.kind or hints[row.old] for row in RENAMED if row.old in hints}, **hints}


def spelled_name(field: str) -> str:
    """A field's name in the installed version."""
    return next(iter(spelled({field: True})))


# The methods and attributes of a model that the same release renamed (PreTrainedModel).
ENABLE_CHECKPOINTING = f"{spelled_name('activation_checkpointing')}_enable"
IS_CHECKPOINTING = f"is_{spelled_name('activation_checkpointing')}"
CHECKPOINTING_KWARGS = spelled_name("activation_checkpointing_kwargs")
CACHE = "cache" if has("transformers", "5.24") else "past_key_values"  # of keys and values: models' inputs and outputs


def checkpoints_activations(args) -> bool:
    """True if TrainingArguments, of any version, ask for activation checkpointing."""
    return bool(getattr(args, spelled_name("activation_checkpointing")))
