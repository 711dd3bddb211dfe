"""What is found in a configuration of nested mappings, and where."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

Keys = tuple[str, ...]  # that lead to a value


class Effect(Enum):
    """What a library does with a value that is found."""

    REFUSED = "refused"
    ACCEPTED = "accepted"  # and yet at fault: nobody reads it, or it fails later
    NOTED = "noted"  # valid, and it acts otherwise than it looks


class Finding(NamedTuple):
    """What there is to say of one value.

    Attributes:
        keys: lead to it; none where it is the whole file.
        text: names the key, its value and what to do.
    """

    keys: Keys
    text: str
    effect: Effect = Effect.REFUSED


def refused(findings: Iterable[Finding]) -> list[Keys]:
    """The keys of values that a library refuses."""
    return [keys for keys, _, effect in findings if keys and effect is Effect.REFUSED]


def value_at(content: Any, keys: Keys, default: Any = None) -> Any:
    """The value that keys lead to."""
    for key in keys:
        if not isinstance(content, Mapping) or key not in content:
            return default
        content = content[key]
    return content


def places(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every key of a configuration, with its value."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield (*keys, key), inner
        yield from places(inner, (*keys, key))


def without(content: Mapping[str, Any], places: Iterable[Keys]) -> dict[str, Any]:
    """A copy of a configuration without the values at places."""
    content = copy.deepcopy(dict(content))
    for keys in places:
        parent = value_at(content, keys[:-1])
        if keys and isinstance(parent, dict):
            parent.pop(keys[-1], None)
    return content
