"""Options of commands in app.py and in packages above the core."""

from typing import Annotated

import typer


def at_least_one(value: int | None) -> int | None:
    """A number of tokens, samples or devices, unchanged.

    Raises:
        typer.BadParameter: it is less than 1, or too large for a size in a tensor's shape.
    """
    if value is not None and not 1 <= value < 2**31:
        raise typer.BadParameter(f"{value} must be at least 1{', and below 2147483648' if value > 0 else ''}")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
