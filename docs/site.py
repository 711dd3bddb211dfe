"""A hook of MkDocs: what pages link to outside docs/ travels with the site, so that it is whole and works offline; no
option of a command is broken between lines.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)((?:#[^)]*)?)\)")
_BLOCK = re.compile(r"<pre>.*?</pre>", re.DOTALL)
_OPTION = re.compile(r"(?<=[\s>])--\w[\w-]*")


def on_files(files, config):
    """Add every file of the repository that a page links to, below repository/."""
    wanted = set()
    for page in files.documentation_pages():
        wanted |= {path for path, _ in _OUTSIDE.findall(page.content_string)}
    for path in sorted(wanted):
        source = ROOT / path
        if source.is_file():
            files.append(File.generated(config, f"repository/{path}.txt", abs_src_path=str(source)))
        elif source.is_dir():
            listed = "".join(f"{child.relative_to(ROOT)}\n" for child in sorted(source.rglob("*")) if child.is_file())
            files.append(File.generated(config, f"repository/{path.rstrip('/')}.txt", content=listed))
    return files


def on_page_markdown(markdown, page, **_):
    """Point those links there; a path that does not exist stays as it is, and the build fails on it."""
    up = "../" * page.file.src_uri.count("/")
    return _OUTSIDE.sub(lambda found: f"]({up}repository/{found[1].rstrip('/')}.txt)", markdown)


def on_page_content(html, **_):
    """Name the options in blocks of code, so that site.css keeps each whole: browsers break lines at hyphens."""
    return _BLOCK.sub(lambda block: _OPTION.sub(r'<span class="option">\g<0></span>', block[0]), html)
