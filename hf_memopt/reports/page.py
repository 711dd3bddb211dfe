"""HTML pages from templates: one self-contained file each, without scripts."""

from pathlib import Path
from typing import Any


def size(value: float | None) -> str:
    """Bytes as text: in GiB, MiB or KiB."""
    if value is None:
        return "unknown"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= factor:
            return f"{value / factor:,.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{value:.0f} B"


def render_page(template: str, **content: Any) -> str:
    """A complete HTML page; all content is escaped.

    Args:
        template: run, runs or snapshot.
        content: the template's variables.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = size
    return environment.get_template(f"{template}.html").render(**content)
