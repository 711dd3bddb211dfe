"""The table of what runs on which card, from cards.json."""

from levers_docs import results, table

GIB = 2**30
_METHODS = ("full", "lora", "qlora")
_NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def cards(up: str) -> str:
    """A line a card, a column a model: the largest method that fits, and what the next larger one would need.

    Args:
        up: from the page to the repository's root.
    """
    found = results("cards")
    needed = {(row["kind"], row["model"], row["method"]): row for row in found["rows"] if "model" in row}
    models = list(dict.fromkeys(model for _, model, _ in needed))
    lines = [
        [
            f"{row['label']} ({row['capacity_bytes'] / GIB:.1f} GiB)",
            *(_cell(row["kind"], model, row["capacity_bytes"], needed) for model in models),
        ]
        for row in found["rows"]
        if "card" in row
    ]
    source = (
        f"Predicted {found['date']} with torch {found['versions']['torch']}, transformers "
        f"{found['versions']['transformers']}: [cards.json]({up}benchmarks/results/cards.json)."
    )
    return f"{table(['card', *(f'`{model}`' for model in models)], lines)}\n\n{source}"


def _cell(kind: str, model: str, capacity: int, needed: dict) -> str:
    """The largest method that fits, with its GiB, and struck out what is next larger; only that where none fits."""
    too_large = ""
    for method in _METHODS:
        row = needed.get((kind, model, method))
        if row is None or "device_bytes" not in row:
            continue
        told = f"{_NAMES[method]} {row['device_bytes'] / GIB:.1f}"
        if row["device_bytes"] <= capacity:
            tight = " (tight)" if row["device_bytes"] > 0.95 * capacity else ""
            return f"**{told}**{tight} {too_large}".strip()
        too_large = f"~~{told}~~"
    return f"{too_large} out of memory"


TABLES = {"cards": lambda: cards(""), "cards of docs": lambda: cards("../")}
