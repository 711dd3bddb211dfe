"""HTML pages from templates: one self-contained file each, without scripts."""

from pathlib import Path
from typing import Any

from hf_memopt.units import size

_TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, folder: Path = _TEMPLATES, **content: Any) -> str:
    """A complete HTML page; all content is escaped.

    Args:
        template: run or runs, or one of the folder's, which may extend page.html.
        folder: of the template.
        content: the template's variables.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, _TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = size
    return environment.get_template(f"{template}.html").render(**content)
