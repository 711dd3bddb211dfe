"""Seconds until a wrong word is refused: python benchmarks/refusals.py

Every refused line of tests/natural_mistakes.toml runs as a process of its own, each beside `hf-memopt --version`: the
ratio says how much more than starting Python it takes.
"""

import os
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from record import record

ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = [sys.executable, "-c", "from hf_memopt.cli.app import main; main()"]


def refused_lines() -> list[str]:
    """The lines of the table that end with a sentence."""
    table = tomllib.loads((ROOT / "tests" / "natural_mistakes.toml").read_text(encoding="utf-8"))
    return [line for lines in table.values() for line, answer in lines.items() if isinstance(answer, str)]


def seconds(program: list[str], words: list[str], folder: str) -> tuple[int, float]:
    """The exit code of a command in an empty folder, and its seconds."""
    began = time.perf_counter()
    done = subprocess.run(
        [*program, *words], cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True
    )
    return done.returncode, time.perf_counter() - began


def main() -> None:
    rows = []
    with TemporaryDirectory() as folder:
        for line in refused_lines():
            words = shlex.split(line)
            program = _PROGRAM
            if words[0].endswith(".py"):
                program, words = [sys.executable, str(ROOT / "recipes" / words[0])], words[1:]
            _, version = seconds(_PROGRAM, ["--version"], folder)
            code, took = seconds(program, words, folder)
            rows.append({"line": line, "seconds": round(took, 3), "version_seconds": round(version, 3)})
            print(f"{took:.2f} s  {line}", file=sys.stderr, flush=True)
            assert code == 2, f"{line} ended with {code}"
    usual = statistics.median(row["version_seconds"] for row in rows)
    slowest = max(rows, key=lambda row: row["seconds"])
    middle = statistics.median(row["seconds"] for row in rows)
    print(
        f"{len(rows)} refusals: median {middle:.2f} s, slowest {slowest['seconds']:.2f} s ({slowest['line']}); "
        f"--version {usual:.2f} s, ratios {middle / usual:.1f} and {slowest['seconds'] / usual:.1f}"
    )
    record("refusals", rows)


if __name__ == "__main__":
    main()
