"""Fill measured, predicted and computed numbers into README.md and docs/: `make docs`, or run this file."""

import re
from pathlib import Path

from docs_tables import TABLES
from docs_tables.markdown import ROOT
from figures import FIGURES

_INLINE = re.compile(r"<!-- =([\w.]+) -->.*?<!-- = -->", re.DOTALL)


def pages() -> list[Path]:
    """README.md and everything under docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(page: Path) -> str:
    """A page with its tables and numbers regenerated.

    Raises:
        KeyError: the page names a number that figures.py does not have.
    """
    text = page.read_text(encoding="utf-8")
    for name, make in TABLES.get(str(page.relative_to(ROOT)), {}).items():
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = marked.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
    return _INLINE.sub(lambda match: f"<!-- ={match[1]} -->{FIGURES[match[1]]()}<!-- = -->", text)


if __name__ == "__main__":
    for path in pages():
        text = filled(path)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
