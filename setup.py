"""The description on PyPI: README.md, with links that work away from the repository. All else is in setup.cfg."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# [text](target), with a picture or plain words as the text; code holds none.
_LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)\s]*\)|[^\]])*)\]\((?!https?:|#)([^)\s]+)\)")


def describe(readme: str, source: str | None) -> str:
    """A README whose links into the repository are absolute.

    Args:
        source: address of the repository; where it is not known, links keep their words and pictures are left out.
    """

    def replaced(found: re.Match) -> str:
        picture, words, target = found.groups()
        if source is None:
            return "" if picture else describe(words, None)
        kind = "raw" if picture else "blob"
        return f"{picture}[{describe(words, source)}]({source.rstrip('/')}/{kind}/main/{target})"

    return _LINK.sub(replaced, readme)


def read_source() -> str | None:
    """`Source` of project_urls in setup.cfg."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    urls = config["metadata"].get("project_urls", "").strip().splitlines()
    return dict(re.split(r"\s*=\s*", url, maxsplit=1) for url in urls).get("Source")


if __name__ == "__main__":
    setup(
        long_description=describe((ROOT / "README.md").read_text(encoding="utf-8"), read_source()),
        long_description_content_type="text/markdown",
    )
