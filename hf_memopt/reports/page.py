"""HTML pages from templates: one self-contained file each, without scripts."""

from pathlib import Path
from typing import Any

from hf_memopt.units import size


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
