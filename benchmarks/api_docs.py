"""Tables of docs/api.md and docs/training.md: fields, defaults and help, from the dataclasses."""

from dataclasses import MISSING, fields
from typing import get_type_hints

from levers_docs import table


def memory_arguments() -> str:
    """One row per field of MemoryArguments."""
    from hf_memopt import MemoryArguments

    return _fields(MemoryArguments)


def recipe_arguments() -> str:
    """One row per argument of the recipes."""
    from hf_memopt.recipe.arguments import RecipeArguments

    return _fields(RecipeArguments)


def _fields(kind: type) -> str:
    types = get_type_hints(kind)  # HfArgumentParser rewrites the types on the fields themselves
    lines = [
        [
            f"`{item.name}`",
            f"`{_type(types[item.name])}`",
            "" if item.default is MISSING else f"`{item.default!r}`",
            item.metadata.get("help", ""),
        ]
        for item in fields(kind)
    ]
    return table(["field", "type", "default", "what it does"], lines)


def _type(kind) -> str:
    return (kind.__name__ if isinstance(kind, type) else str(kind)).replace(" | ", " or ")


def profiles() -> str:
    """One row per memory profile."""
    from hf_memopt.levers.arguments import PROFILES

    lines = [
        [f"{name} (default)" if name == "balanced" else name, *(f"{share:.2f}" for share in shares)]
        for name, shares in PROFILES.items()
    ]
    return table(["`memory_profile`", "target", "warning", "critical", "emergency"], lines)


TABLES = {"memory arguments": memory_arguments, "recipe arguments": recipe_arguments, "profiles": profiles}
