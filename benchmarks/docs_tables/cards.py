"""README.md and docs/quickstart.md: what runs on which card."""

from functools import partial

from docs_tables.markdown import (
    METHOD_NAMES,
    gib,
    predicted,
    results,
    table,
)

from hf_memopt.levers.arguments import PLAN_PROFILES

_FEW = ("rtx_3060", "rtx_4090", "a100_80gb", "mi300x", "apple_m2_16gb")


def cards(up: str, few: bool = False) -> str:
    """One row per card, one column per model: the largest method that fits, and what the next larger one would need.

    Args:
        up: relative path from the page to the repository root.
        few: a card of each kind alone.
    """
    rows = results("cards")["rows"]
    needs = {(row["kind"], row["model"], row["method"]): row.get("device_bytes") for row in rows if "model" in row}
    models = list(dict.fromkeys(model for _, model, _ in needs))
    lines = []
    for card in (row for row in rows if "card" in row and (not few or row["card"] in _FEW)):
        streamed = [needs.get((card["kind"], model, "streamed")) for model in models]
        sizes = ({method: needs.get((card["kind"], model, method)) for method in METHOD_NAMES} for model in models)
        label = f"{card['label']} ({gib(card['capacity_bytes'])} GiB)"
        asked = map(card["host_memory"].get, models)
        cells = map(partial(largest_method, capacity=card["capacity_bytes"]), sizes, streamed, asked)
        lines.append([label, f"{gib(card['host_bytes'])} GiB", *cells])
    heads = ["card", "host memory", *(f"`{model}`" for model in models)]
    return f"{table(heads, lines)}\n\n{predicted('cards', up)}"


def largest_method(
    sizes: dict[str, int | None], streamed: int | None, host_memory: int | None = None, *, capacity: int
) -> str:
    """The largest method that fits, in bold, and the next larger one, struck through; if none fits, QLoRA with its
    weights in host memory, where that does.

    Args:
        streamed: what it needs of the device then.
        host_memory: GiB of the host that it needs, where a plan assumes less.
    """
    too_large = ""
    for method, size in sizes.items():
        if size is None:
            continue
        need = f"{METHOD_NAMES[method]} {gib(size)}"
        if size <= capacity:
            tight = " (tight)" if size > PLAN_PROFILES["maximum"][1] * capacity else ""  # more than plans fill
            return f"**{need}**{tight} {too_large}".strip()
        too_large = f"~~{need}~~"
    if streamed and streamed <= PLAN_PROFILES["maximum"][1] * capacity:
        need = f", with `--host-memory {host_memory}`" if host_memory else ""
        return f"weights in host memory {gib(streamed)}{need} {too_large}"
    return f"{too_large} out of memory"
