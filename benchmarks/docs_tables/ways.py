"""docs/on_*.md and docs/quickstart.md: what their plans print, and the commands that these end with."""

from collections.abc import Callable
from functools import partial

from docs_tables.markdown import results
from ways import planned_command

RUN = "out/my-model"


def answers() -> dict[str, dict[str, Callable[[], str]]]:
    """Each plan's output, and the command that trains what it planned, by page and marker."""
    pages: dict[str, dict[str, Callable[[], str]]] = {}
    for row in (row for row in results("ways")["rows"] if row["page"] != "README.md"):
        page = pages.setdefault(f"docs/{row['page']}", {})
        number = len(page) // 2 + 1
        page[f"answer {number}"] = partial(_fenced, "text", row["output"].rstrip())
        page[f"train {number}"] = partial(_training, row["output"])
    return pages


def _training(output: str) -> str:
    command = planned_command(output).replace("\n", "\n    ")
    return _fenced("bash", f"{command} \\\n    --output_dir {RUN}")


def _fenced(kind: str, text: str) -> str:
    return f"```{kind}\n{text}\n```"
