"""The tables of tables/*.toml: what each key of another tool's configuration is here."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hf_memopt.yaml_values import read_yaml

_FOLDER = Path(__file__).parent / "tables"
EFFECTS = ("memory", "approximated", "none", "refused")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a key is here; of several rows of a key the first that holds is taken.

    Attributes:
        key: theirs, dotted inside a mapping; a * at its end stands for a family of names.
        to: ours: a field of JobSpec; training., lora., quantization., memory. or sizes. and a field. A + at its end
            adds to a list, a * stands for their key.
        values: theirs, as text -> ours. Other values are another row's.
        only: the values, as text, that the row is about; a * stands for anything.
        when: other keys of theirs with the values, as text, that they must have; or set, unset, several (above 1).
        also: ours -> value, set beside `to`.
        via: a function of values.py that makes our value.
        effect: on memory.
        why: how it is approximated, or the reason of a refusal, in words that follow "key=value: ".
    """

    key: str
    to: str = ""
    values: Mapping[str, Any] | None = None
    only: tuple[str, ...] | None = None
    when: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, Any] = field(default_factory=dict)
    via: str = ""
    effect: str = "memory"
    why: str = ""

    @property
    def is_switch(self) -> bool:
        """True if only a value that is on says something."""
        return self.effect in ("refused", "approximated") and self.values is None and self.only is None and not self.to

    def is_about(self, key: str) -> bool:
        """True if a key of theirs is the row's."""
        return key == self.key or (self.key.endswith("*") and key.startswith(self.key[:-1]))

    def holds(self, value: Any, settings: Mapping[str, Any]) -> bool:
        """True if it says what a value means among the file's other settings."""
        text = as_text(value)
        return (
            (self.only is None or any(fnmatchcase(text, pattern) for pattern in self.only))
            and (self.values is None or text in self.values)
            and all(_matches(_setting(key, settings), wanted) for key, wanted in self.when.items())
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    """A tool.

    Attributes:
        name: as its users write it.
        version: that was read, with its commit.
        source: where its keys and defaults are.
        defaults: its settings where a file has none.
        multiples: a setting -> another and a factor, which is its default.
        rows: in the order in which they are asked.
        plan: ours -> their keys that a plan may set: `key` with the `values` of ours in their words, and `flags` that
            are on with some of ours and taken out with others; or what they `set`. Strategies that no key says are
            `launched`, `without` the keys of others.
        expandable: it sets the allocator's expandable segments itself.
        engines: name of a DeepSpeed file that it ships -> what of its content memory sees.
        step_samples: of an optimizer step over all devices, where a file sets no accumulation.
        length: the reason that a file without a length says nothing of memory; empty where the tool has a default.
        models: name of a component that builds a model -> its hub id.
        one_device: the reason that several devices are refused; empty where they are not.
        required: keys without which a file is no training job.
        implied: key of theirs that a file may leave out -> each of its values -> keys, or key=value, that go with it.
    """

    name: str
    version: str
    source: str
    rows: tuple[Row, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    multiples: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    plan: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    expandable: bool = False
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    step_samples: int = 0
    length: str = ""
    one_device: str = ""
    models: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    implied: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def rows_of(self, key: str) -> list[Row]:
        """The rows about a key: those that name it, or else the families' that it belongs to."""
        named = [row for row in self.rows if row.key == key]
        return named or [row for row in self.rows if row.is_about(key)]

    def features(self) -> frozenset[str]:
        """The settings of a plan that have keys of theirs (planner's Choice.features)."""
        strategy, optim = self.plan.get("strategy", {}), self.plan.get("training.optim", {})
        # Strategies that a key of theirs or their launcher starts; values of optim that have a word of theirs.
        strategies = strategy.get("launched") or strategy.get("values", ())
        rows = (row.values or {} for row in self.rows if row.to == "training.optim")
        optimizers = optim.get("values") or {ours for values in rows for ours in values.values()}
        return frozenset(
            {name for name in self.plan if name not in ("strategy", "training.optim")}
            | {f"strategy.{name}" for name in strategies}
            | {f"optim.{name}" for name in optimizers}
        )

    @property
    def launched(self) -> bool:
        """True if accelerate launch starts a plan's strategy, and no key of theirs does."""
        return "launched" in self.plan.get("strategy", {})

    def theirs(self, ours: str, value: Any) -> dict[str, Any]:
        """Their keys and values for a setting of ours that a plan chose; None takes a key out.

        Args:
            ours: a name of `plan`.
        """
        entry = self.plan[ours]
        if "set" in entry:
            return dict(entry["set"]) if value else {}
        if "launched" in entry:
            return dict.fromkeys(entry["without"])
        key, words = entry["key"], entry.get("values")
        if words is None:
            rows = [row.values for row in self.rows_of(key) if row.to == ours and row.values]
            pairs = [pair for values in rows for pair in values.items()]
            words = {as_text(our): read_yaml(their, key) for their, our in reversed(pairs)}  # the first of several
        flags = {flag: True if as_text(value) in on else None for flag, on in entry.get("flags", {}).items()}
        other = None if ours == "strategy" else value  # plain training has no engine's file
        return {key: words.get(as_text(value), other), **flags}

    def reads_null(self, key: str) -> bool:
        """True if null says something: else it stands for what the tool does by itself."""
        return any("none" in [*(row.only or ()), *(row.values or ())] for row in self.rows if row.key == key)

    def place(self, key: str) -> int:
        """The number of the first row about a key; after all others where there is none."""
        return next((number for number, row in enumerate(self.rows) if row.is_about(key)), len(self.rows))

    def inside(self, key: str) -> bool:
        """True if keys within a mapping of theirs have rows of their own."""
        return any(row.key.startswith(f"{key}.") for row in self.rows)


def as_text(value: Any) -> str:
    """A value as tables write it."""
    return str(value).strip().lower() if isinstance(value, bool | str) or value is None else str(value)


def is_off(value: Any) -> bool:
    """True if a value leaves a switch off, or a list empty."""
    return value in (None, False, "", 0, "false", "none", "None", "False") or value == [] or value == {}


def _setting(key: str, settings: Mapping[str, Any]) -> Any:
    """A setting; of a family with a * at its end the first that is on."""
    if not key.endswith("*"):
        return settings.get(key)
    return next((value for name, value in settings.items() if name.startswith(key[:-1]) and not is_off(value)), None)


def _matches(value: Any, wanted: Any) -> bool:
    if wanted in ("set", "unset"):
        return is_off(value) == (wanted == "unset")
    if wanted == "several":
        return as_text(value).isdecimal() and int(value) > 1
    return as_text(value) in [as_text(one) for one in (wanted if isinstance(wanted, list) else [wanted])]


@functools.cache
def read_table(tool: str) -> Table:
    """The table of a tool, by the name of its file."""
    content = tomllib.loads((_FOLDER / f"{tool}.toml").read_text(encoding="utf-8"))
    rows = tuple(row for entry in content.pop("rows") for row in _rows(entry))
    return Table(rows=rows, **content)


def list_tables() -> dict[str, Table]:
    """File name -> table, of every tool."""
    return {path.stem: read_table(path.stem) for path in sorted(_FOLDER.glob("*.toml"))}


def _rows(entry: dict[str, Any]) -> list[Row]:
    """The row of an entry, or one for each of its `keys`, which may be a text of words."""
    keys = entry.pop("keys", None) or [entry.pop("key")]
    if "only" in entry:
        entry["only"] = tuple(as_text(value) for value in entry["only"])
    return [Row(key=key, **entry) for key in (keys.split() if isinstance(keys, str) else keys)]
