"""What `hf-memopt advise` says of the logs in tests/logs, beside their threads: python benchmarks/advised_logs.py

The rules were written with these logs at hand, so the counts show what is known, not what is found of unknown logs.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hf_memopt.reports.advice import advise_on_text

COUNTS = ("logs", "kinds", "causes", "named", "confirmed")
LOGS = Path(__file__).resolve().parent.parent / "tests" / "logs"


def read_table() -> list[dict[str, Any]]:
    """The rows of logs.toml."""
    return tomllib.loads((LOGS / "logs.toml").read_text(encoding="utf-8"))["log"]


def judge(row: dict[str, Any]) -> tuple[bool, bool | None]:
    """True if the cause is right; and if the first change is one that the thread confirms, None if it names none."""
    advice = advise_on_text((LOGS / f"{row['file']}.txt").read_text(encoding="utf-8"))
    if advice is None or "what" not in row:
        return advice is None and "what" not in row, False if "fix" in row else None
    facts = all(getattr(advice, name) == row.get(name) for name in ("what", "stage", "step"))
    confirmed = bool(re.search(row["fix"], advice.changes[0]["change"])) if "fix" in row else None
    return facts and row["why"] in advice.why, confirmed


def count() -> dict[str, int]:
    """Counts over the logs whose thread is recorded."""
    rows = [row for row in read_table() if row["source"]]
    causes, confirmed = zip(*map(judge, rows), strict=True)
    kinds, named = len({row["kind"] for row in rows}), sum(one is not None for one in confirmed)
    numbers = (len(rows), kinds, sum(causes), named, sum(one is True for one in confirmed))
    return dict(zip(COUNTS, numbers, strict=True))


if __name__ == "__main__":
    for entry in read_table():
        cause, fix = judge(entry)
        if not cause or fix is False:
            print(f"{entry['file']}: cause {'right' if cause else 'wrong'}, first change confirmed: {fix}")
    print(count())
