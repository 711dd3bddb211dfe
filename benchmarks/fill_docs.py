"""Fill measured, predicted and computed numbers into README.md and docs/: `make docs`, or run this file."""

import re
from pathlib import Path

import api_docs
import cards_docs
import clusters_docs
import devices_docs
import grpo_docs
import guides_docs
import levers_docs
import model_types_docs
import optimizers_docs
import peft_docs
import plans_docs
import presets_docs
import questions_docs
import scripts_docs
import speed_docs
import trl_docs
import video_docs
from figures import FIGURES
from levers_docs import ROOT

_INLINE = re.compile(r"<!-- =([\w.]+) -->.*?<!-- = -->", re.DOTALL)
_TABLES = {
    "docs/index.md": questions_docs.FIRST_PAGE,
    "docs/levers.md": levers_docs.TABLES,
    "docs/memory.md": {**devices_docs.TABLES, **optimizers_docs.TABLES, **peft_docs.TABLES},
    "docs/estimate.md": {**model_types_docs.TABLES, **scripts_docs.TABLES},
    "docs/plans.md": {**plans_docs.TABLES, **questions_docs.TABLES, **speed_docs.TABLES},
    "docs/clusters.md": clusters_docs.TABLES,
    "docs/grpo.md": grpo_docs.TABLES,
    "docs/guides.md": guides_docs.TABLES,
    "README.md": {**cards_docs.TABLES, **speed_docs.TABLES},
    "docs/video.md": video_docs.TABLES,
    "docs/api.md": api_docs.TABLES,
    "docs/training.md": api_docs.TABLES,
    "docs/presets.md": presets_docs.TABLES,
    "docs/trl.md": trl_docs.TABLES,
    "docs/quickstart.md": cards_docs.TABLES,
}


def pages() -> list[Path]:
    """README.md and everything under docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(path: Path) -> str:
    """A page with its tables and numbers regenerated.

    Raises:
        KeyError: the page names a number that figures.py does not have.
    """
    text = levers_docs.filled(path, _TABLES.get(str(path.relative_to(ROOT)), {}))
    return _INLINE.sub(lambda match: f"<!-- ={match[1]} -->{FIGURES[match[1]]()}<!-- = -->", text)


if __name__ == "__main__":
    for path in pages():
        text = filled(path)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
