"""The answers on the pages of five people, from an empty folder on: python benchmarks/ways.py

Every plan on docs/on_*.md, and what README.md's picture shows, is asked in a folder with my_chats.jsonl, as from a
clone, on a terminal of 80 columns; results/ways.json has what was printed. tests/test_ways.py asks again.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 2000
README = (  # of its picture
    "hf-memopt estimate llama-3.1-8b --hardware rtx_4090 --method lora",
    "hf-memopt plan llama-3.1-8b --hardware rtx_4090 --seq-len 2048",
)
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    return sorted((ROOT / "docs").glob("on_*.md"))


def commands(page: Path) -> list[str]:
    """The commands of a page, each in one line."""
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def write_chats(folder: Path, samples: int = SAMPLES) -> None:
    """The data set of the pages, of short chats."""
    turns = (
        ({"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}."})
        for n in range(samples)
    )
    rows = (json.dumps({"messages": list(pair)}) + "\n" for pair in turns)
    (folder / "my_chats.jsonl").write_text("".join(rows), encoding="utf-8")


_AS_FROM_CLONE = """
import sys, hf_memopt.planner.launch as launch
from pathlib import Path
root = Path(sys.argv.pop(1))
launch.from_here = lambda path: path.resolve().relative_to(root).as_posix()
from hf_memopt.cli import main
main()
"""


def ask(command: str) -> tuple[int, str]:
    """Exit code and output of a command of hf-memopt, in its own process, with paths as from a clone."""
    words = [sys.executable, "-c", _AS_FROM_CLONE, str(ROOT), *shlex.split(command)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, check=False)
    return done.returncode, done.stdout


def answered(page: Path) -> list[dict]:
    """The plans of a page, or README's two answers, as they are printed now."""
    rows = []
    asked = (line for line in commands(page) if line.startswith("hf-memopt plan"))
    for command in README if page.name == "README.md" else asked:
        code, output = ask(command)
        rows.append({"page": page.name, "command": command, "exit": code, "output": output})
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_chats(Path(folder))
        record(
            "ways",
            [row for page in (ROOT / "README.md", *pages()) for row in answered(page)],
            "python benchmarks/ways.py",
        )
