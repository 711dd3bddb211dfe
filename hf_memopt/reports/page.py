"""Pages from templates; one file each, without a script, readable offline."""

from pathlib import Path
from typing import Any


def size(value: float | None) -> str:
    """Bytes as text for people: GiB, below one MiB or KiB."""
    if value is None:
        return "unknown"
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= one:
            return f"{value / one:,.2f} {unit}" if unit == "GiB" else f"{value / one:,.1f} {unit}"
    return f"{value:.0f} B"


def render_page(template: str, **about: Any) -> str:
    """A whole HTML page; what is put in is escaped.

    Args:
        template: run, runs or snapshot.
        about: what it shows.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["size"] = size
    return pages.get_template(f"{template}.html").render(**about)
