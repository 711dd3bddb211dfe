"""A memory feature's declaration beside its arguments; MemoryArguments is made of all features (arguments.py)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_memopt.levers.change import Change
from hf_memopt.levers.knob import Knob


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
    """

    above_zero: ClassVar[tuple[str, ...]] = ()
    shares: ClassVar[dict[str, str]] = {}
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    order: ClassVar[int] = 0
    proposed: ClassVar[Change | None] = None
    planned: ClassVar[tuple[Knob, ...]] = ()

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

    @staticmethod
    def put_on_optimizer(on, optimizer, host: dict[str, Any]) -> None:
        """Change an optimizer; `host` has the keyword arguments of keep_on_host()."""


def liger_replaces(fields: Mapping[str, Any], *kernels: str) -> bool:
    """True if Liger's kernels, all but cross_entropy by default, stand for one of these."""
    chosen = fields.get("liger_kernel_config")
    chosen = chosen if isinstance(chosen, Mapping) else {}
    return bool(fields.get("use_liger_kernel")) and any(chosen.get(name, name != "cross_entropy") for name in kernels)
