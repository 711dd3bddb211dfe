"""The picture of a question and its answers in README.md: python benchmarks/plan_picture.py

Runs the two commands, and draws what they print up to their first table, as a terminal of 84 columns shows it.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "plan.svg"
COLUMNS = 84
COMMANDS = (
    "hf-memopt estimate llama-3.1-8b --hardware rtx_4090 --method lora",
    "hf-memopt plan llama-3.1-8b --hardware rtx_4090 --seq-len 2048",
)


def answer(command: str) -> str:
    """What a command prints, up to the end of its first table.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    words = [str(Path(sys.executable).parent / "hf-memopt"), *shlex.split(command)[1:]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    lines = done.stdout.splitlines()
    end = next(number for number, line in enumerate(lines) if "└" in line)
    return "\n".join(lines[: end + 1])


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for command in COMMANDS:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(answer(command)))
        console.print()
    console.save_svg(str(PICTURE), title="predicted, before anything runs")


if __name__ == "__main__":
    main()
