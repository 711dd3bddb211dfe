"""The table of what runs on which card, from cards.json."""

from levers_docs import results, table

from hf_memopt.levers.arguments import PLAN_PROFILES

GIB = 2**30
MOST = PLAN_PROFILES["maximum"][1]  # of a card, as plans fill it
_METHODS = ("full", "lora", "qlora")
_NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def cards(up: str) -> str:
    """One row per card, one column per model: the largest method that fits, and what the next larger one would need.

    Args:
        up: relative path from the page to the repository root.
    """
    data = results("cards")
    rows = {(row["kind"], row["model"], row["method"]): row for row in data["rows"] if "model" in row}
    models = list(dict.fromkeys(model for _, model, _ in rows))
    lines = [
        [
            f"{row['label']} ({row['capacity_bytes'] / GIB:.1f} GiB)",
            *(_cell(row["kind"], model, row["capacity_bytes"], rows) for model in models),
        ]
        for row in data["rows"]
        if "card" in row
    ]
    source = (
        f"Predicted {data['date']} with torch {data['versions']['torch']}, transformers "
        f"{data['versions']['transformers']}: [cards.json]({up}benchmarks/results/cards.json)."
    )
    return f"{table(['card', *(f'`{model}`' for model in models)], lines)}\n\n{source}"


def _cell(kind: str, model: str, capacity: int, rows: dict) -> str:
    """The largest method that fits, in bold, and the next larger one, struck through; only the latter if none fits."""
    too_large = ""
    for method in _METHODS:
        row = rows.get((kind, model, method))
        if row is None or "device_bytes" not in row:
            continue
        need = f"{_NAMES[method]} {row['device_bytes'] / GIB:.1f}"
        if row["device_bytes"] <= capacity:
            tight = " (tight)" if row["device_bytes"] > MOST * capacity else ""
            return f"**{need}**{tight} {too_large}".strip()
        too_large = f"~~{need}~~"
    return f"{too_large} out of memory"


TABLES = {"cards": lambda: cards(""), "cards of docs": lambda: cards("../")}
