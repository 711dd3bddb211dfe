"""The answers on the pages that begin in an empty folder: python benchmarks/ways.py [PAGE …]

Every plan on docs/on_*.md and docs/quickstart.md, and what README.md's picture shows, is asked in a folder of its own
with a clone and what the page's own blocks have written, on a terminal of 80 columns. results/ways.json has what was
printed; make docs puts it, and the command that it ends with, on the page. With names of pages (on_wsl) only theirs
are asked again. tests/cli/test_ways.py runs every block of these pages.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from record import RESULTS, record

ROOT = Path(__file__).resolve().parent.parent
README = (  # of its picture
    "hf-memopt estimate llama-3.1-8b --hardware rtx_4090 --method lora",
    "hf-memopt plan llama-3.1-8b --hardware rtx_4090 --seq-len 2048",
)
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_CLONED = ("hf_memopt", "recipes", "accelerate_configs", "docs", "setup.cfg")


def pages() -> list[Path]:
    return [*sorted((ROOT / "docs").glob("on_*.md")), ROOT / "docs" / "quickstart.md"]


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """What a reader of a page does, in its order: ("bash", a command in one line) or ("python", a block)."""
    for kind, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            yield kind, block
            continue
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            if command := line.partition("  #")[0].strip():
                yield kind, command


def commands(page: Path) -> list[str]:
    """The shell commands of a page, each in one line."""
    return [command for kind, command in steps(page) if kind == "bash"]


def is_plan(command: str) -> bool:
    return command.startswith("hf-memopt plan ")


def makes_data(kind: str, command: str) -> bool:
    """True of a step that writes the data which the page's next commands read."""
    return kind == "python" or command.startswith("seq ")


def clone(folder: Path) -> None:
    """Put what the pages use of a clone into an empty folder."""
    for name in _CLONED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)


def make_data(kind: str, command: str, folder: Path) -> None:
    words = ["sh", "-c", command] if kind == "bash" else [sys.executable, "-c", command]
    subprocess.run(words, cwd=folder, check=True)


def ask(command: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a command of hf-memopt, by the package of the clone in a folder."""
    words = [sys.executable, "-c", "from hf_memopt.cli import main; main()", *shlex.split(command)[1:]]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    return done.returncode, done.stdout


def answered(page: Path, folder: Path) -> list[dict]:
    """The plans of a page, or README's two answers, as they are printed now in an empty folder."""
    clone(folder)
    rows = []
    for kind, command in (("bash", line) for line in README) if page.name == "README.md" else steps(page):
        if makes_data(kind, command):
            make_data(kind, command, folder)
        elif is_plan(command) or command in README:
            code, output = ask(command, folder)
            rows.append({"page": page.name, "command": command, "exit": code, "output": output})
    return rows


def planned_command(output: str) -> str:
    """The command that a plan's answer ends with, in its lines; empty where the answer has none."""
    lines = output.splitlines()
    begin = next((place for place, line in enumerate(lines) if line.startswith("run    ")), len(lines))
    end = next((place for place in range(begin, len(lines)) if not lines[place].endswith("\\")), begin - 1)
    return "\n".join(line[7:] for line in lines[begin : end + 1])


if __name__ == "__main__":
    asked = [page for page in (ROOT / "README.md", *pages()) if not sys.argv[1:] or page.stem in sys.argv[1:]]
    rows = [] if len(sys.argv) == 1 else json.loads((RESULTS / "ways.json").read_text(encoding="utf-8"))["rows"]
    for page in asked:
        with tempfile.TemporaryDirectory() as folder:
            rows = [row for row in rows if row["page"] != page.name] + answered(page, Path(folder))
    names = [page.name for page in (ROOT / "README.md", *pages())]
    record("ways", sorted(rows, key=lambda row: names.index(row["page"])), "python benchmarks/ways.py")
