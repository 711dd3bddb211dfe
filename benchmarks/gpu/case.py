"""A case: the unit that is measured, in a process of its own; and the file that its row is written to."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "gpu"


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        part: the module of this package that measures it.
        name: unique within the part.
        worth: lower runs first; cases of all parts are in one order.
        settings: what measure() needs, as JSON values.
        env: variables of the process, such as PYTORCH_ALLOC_CONF.
        limit: seconds after which the process is killed.
        rehearse: measured on a CPU, with tiny models.
    """

    part: str
    name: str
    worth: int
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    limit: int = 90
    rehearse: bool = False

    @property
    def key(self) -> str:
        """part/name."""
        return f"{self.part}/{self.name}"


class Results:
    """The rows of one device in one file, which is whole at any moment: a row is kept as soon as its case ends.

    One file for all parts, since a machine that is lent may hand back only a few.

    Args:
        folder: of the device.
        header: hardware, driver, versions and command.
        fresh: start without the rows of earlier calls.
    """

    def __init__(self, folder: Path, header: dict[str, Any], fresh: bool = False) -> None:
        self.path = folder / "results.json"
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob(".results.json.*"):  # left by write_whole() of a process that was killed
            torn.unlink()
        self.header, self.rows = header, {}
        if not fresh:
            committed = COMMITTED / folder.name / "results.json"
            source = next((path for path in (self.path, committed) if path.is_file()), None)
            self.rows = {row["case"]: row for row in load(source)["rows"]} if source else {}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a case's row in place of its older one, with what it was measured by: later calls may have others."""
        measured_by = {name: self.header.get(name) for name in ("driver", "cuda", "versions", "command")}
        self.rows[row["case"]] = row | measured_by
        content = {**self.header, "rows": list(self.rows.values())}
        write_whole(self.path, json.dumps(content, indent=1, default=str) + "\n")

    def is_measured(self, case: Case) -> bool:
        """Whether an earlier call has measured the case. Failed and skipped ones are tried again."""
        return self.rows.get(case.key, {}).get("outcome") == "measured"


def load(path: Path) -> dict[str, Any]:
    """A device's results file."""
    return json.loads(path.read_text(encoding="utf-8"))
