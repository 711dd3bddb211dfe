"""Every table of README.md and docs/, by page and marker, from results/*.json, the package and docs/guides.toml.

A module a page, or the pages that share their tables; fill_docs.py (make docs) writes them.
"""

from collections.abc import Callable
from functools import partial

from docs_tables import clusters, estimate, foreign, levers, memory, plans, trl, video
from docs_tables.cards import cards
from docs_tables.guides import guide_items
from docs_tables.package import API, presets
from docs_tables.questions import FIRST_QUESTIONS, answer, question_rows
from docs_tables.speeds import plans_of_grpo, published_speeds, steps_of_grpo
from docs_tables.stacks import stacks
from docs_tables.ways import answers

TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"few cards": partial(cards, "", few=True)},
    "docs/api.md": API,
    "docs/clusters.md": clusters.TABLES,
    "docs/estimate.md": estimate.TABLES,
    "docs/grpo.md": {
        "phases of GRPO": trl.grpo_phases,
        "steps of GRPO": steps_of_grpo,
        "plans of GRPO": plans_of_grpo,
    },
    "docs/guides.md": {"guides": guide_items},
    "docs/index.md": {f"first {name}": partial(answer, name, short=True) for name in FIRST_QUESTIONS}
    | {"first own script": estimate.own_script},
    "docs/levers.md": levers.TABLES,
    "docs/migration.md": foreign.TABLES,
    "docs/memory.md": memory.TABLES,
    "docs/plans.md": plans.TABLES
    | {"published speeds": published_speeds}
    | {name: partial(answer, name) for name in question_rows()},
    "docs/presets.md": {"presets": presets},
    "docs/quickstart.md": {"cards of docs": partial(cards, "../")},
    "docs/training.md": API,
    "docs/trl.md": trl.TABLES,
    "docs/versions.md": {"stacks": stacks},
    "docs/video.md": video.TABLES,
}
for page, made in answers().items():
    TABLES[page] = TABLES.get(page, {}) | made
