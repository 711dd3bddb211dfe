"""A memory feature's declaration beside its arguments: MemoryArguments is made of all features (arguments.py), and
plans choose the knobs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from hf_memopt.levers.change import Change


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


@dataclass
class Feature:
    """The base of features, dataclasses whose fields are arguments. Hooks take MemoryArguments, `on`.

    Attributes:
        above_zero: fields that must be, where they are set.
        shares: fields from 0 to 1, and what 0 stands for.
        choices: fields and their values beside None.
        order: features are put on a model in rising order, equal ones as MemoryArguments lists them.
        proposed: the change that estimates try where memory is short.
        planned: how plans choose it.
        of_optimizer: it changes the optimizer.
    """

    above_zero: ClassVar[tuple[str, ...]] = ()
    shares: ClassVar[dict[str, str]] = {}
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    order: ClassVar[int] = 0
    proposed: ClassVar[Change | None] = None
    planned: ClassVar[tuple[Knob, ...]] = ()
    of_optimizer: ClassVar[bool] = False

    @staticmethod
    def check(on) -> None:
        """Refuse values that above_zero, shares and choices do not.

        Raises:
            InputError: a value that cannot be used.
        """

    @staticmethod
    def refused(on, facts) -> Iterator[str]:
        """A sentence for each setting of the job (facts.Facts) that the feature does not go with."""
        return iter(())

    @staticmethod
    def put_on(on, model, label_smoothing: float) -> None:
        """Change a model.

        Raises:
            InputError: the feature does not support it.
        """

    @classmethod
    def is_on(cls, on) -> bool:
        """True if one of its arguments is set."""
        return any(getattr(on, item.name) for item in fields(cls))

    @staticmethod
    def choose_optimizer(trainer) -> None:
        """Where of_optimizer, and it is on: change which optimizer a Trainer creates."""

    @staticmethod
    def put_on_optimizer(optimizer, host: dict[str, Any]) -> None:
        """Where of_optimizer, and it is on: change an optimizer. `host` has the arguments of keep_on_host()."""


def liger_replaces(fields: Mapping[str, Any], *kernels: str) -> bool:
    """True if Liger's kernels, all but cross_entropy by default, stand for one of these."""
    chosen = fields.get("liger_kernel_config")
    chosen = chosen if isinstance(chosen, Mapping) else {}
    return bool(fields.get("use_liger_kernel")) and any(chosen.get(name, name != "cross_entropy") for name in kernels)
