"""A memory feature as plans choose it: what it sets, what that does to memory and time. Each in its feature's file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A memory feature that a plan switches on or off.

    The hooks take planner's Sketch and Cost, and a Choice that has the feature on.

    Attributes:
        name: the MemoryArguments field, by which Choice.knobs and other tools' keys name it.
        settings: MemoryArguments fields with the feature on.
        words: in a summary.
        family: as plans name the choices that have it, beside those without; "" where they do not.
        short: in a table of cards; "" where it has no room.
        group: knobs of one group exclude each other.
        offered: whether the search tries it for a settled JobSpec, a task and an engine; None where the optimizer's
            choices say so.
        bytes: changes what a segment holds, by kind, of which `growing` bytes are activations of its layers.
        host: bytes that it keeps on the host.
        seconds: those of a micro-batch, of those without it.
        moves_activations: to host memory and back, by the link.
        on_host: it uses host memory.
        rounds: it rounds values that the method keeps exact.
        of_states: it is the optimizer's, whose sketch errs in its own way.
    """

    name: str
    settings: Mapping[str, Any]
    words: str
    family: str = ""
    short: str = ""
    group: str = ""
    offered: Callable[[Any, str, Any], bool] | None = None
    bytes: Callable[[dict[str, float], float, Any, Any], None]
    host: Callable[[Any, Any], float] = lambda sketch, choice: 0.0
    seconds: Callable[[float, Any, Any], float] = lambda seconds, cost, choice: seconds
    moves_activations: bool = False
    on_host: bool = False
    rounds: bool = False
    of_states: bool = False
