"""The answers on the pages of five people, from an empty folder on: python benchmarks/ways.py

Every plan on docs/on_*.md, and what README.md's picture shows, is asked in a folder with my_chats.jsonl, as from a
clone, on a terminal of 80 columns; results/ways.json has what was printed. tests/test_ways.py asks again.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

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


def ask(command: str) -> tuple[int, str]:
    """Exit code and output of a command of hf-memopt, whose paths are printed as from a clone."""
    from hf_memopt.cli import main

    def from_clone(path: Path) -> str:
        return path.resolve().relative_to(ROOT).as_posix()

    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", shlex.split(command)),
        mock.patch("hf_memopt.planner.launch.from_here", from_clone),
        mock.patch.dict(os.environ, COLUMNS="80"),
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
    ):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), output.getvalue()
    return 0, output.getvalue()


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
