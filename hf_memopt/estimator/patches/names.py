"""A row of the table of replaced names: names of one owner, which a trace uses for one reason."""

from dataclasses import dataclass
from enum import Enum

from hf_memopt.stack.versions import has


class Use(Enum):
    """The use of a name by a trace."""

    REPLACED = "replaced"
    CALLED = "called or read"
    INSTANCE = "set by the class on its instances"


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names that are used for one reason.

    Attributes:
        owner: `module`, or `module:Class`.
        names: name -> the parameters that are relied on, as `inspect.signature` orders them; None for values and for
            functions written in C, which have no signature.
        why: what the trace needs from them.
        until: when the row can go.
        since: the first version of the owner's package that has what the row replaces; older ones need no replacement.
    """

    owner: str
    names: dict[str, str | None]
    why: str
    until: str
    use: Use = Use.REPLACED
    since: str = "0"

    @property
    def library(self) -> str:
        """The package that the names belong to."""
        return self.owner.partition(":")[0].partition(".")[0]

    @property
    def needed(self) -> bool:
        """True if the installed version has what the row replaces."""
        return has(self.library, self.since)

    def paths(self) -> dict[str, str | None]:
        """Path -> parameters."""
        return {path_to(self.owner, name): parameters for name, parameters in self.names.items()}


def path_to(owner: str, name: str) -> str:
    """`module:name` or `module:Class.name`."""
    return f"{owner}.{name}" if ":" in owner else f"{owner}:{name}"
