"""The statements of each room against their budget: python benchmarks/statements.py

`make lint` fails where a room has more than data/statements.toml allows. What is added is paid for by what it makes
unnecessary; a change that has to raise a budget writes the new number there, with a comment: why, and for whom.
"""

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "benchmarks" / "data" / "statements.toml"


def count(file: Path) -> int:
    """The statements of a file, docstrings left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = sum(isinstance(text, ast.Constant) and isinstance(text.value, str) for text in texts)
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - docstrings


def rooms() -> Counter[str]:
    """Room -> statements; files of the package itself are "top level"."""
    package, found = ROOT / "hf_memopt", Counter()
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).parts
        found[parts[0] if len(parts) > 1 else "top level"] += count(file)
    found["recipes"] = sum(map(count, (ROOT / "recipes").glob("*.py")))
    return found


def faults(found: Counter[str], budget: dict[str, int]) -> list[str]:
    """A sentence for each room that is over its budget, has none, or is gone."""
    over = [
        f"{room}: {statements} statements, and the budget is {budget.get(room, 0)}"
        for room, statements in sorted(found.items())
        if statements > budget.get(room, 0)
    ]
    return over + [f"{room}: no such room any more: take its budget out" for room in budget.keys() - found.keys()]


def main() -> None:
    found = rooms()
    wrong = faults(found, tomllib.loads(BUDGET.read_text(encoding="utf-8")))
    print("\n".join(wrong) or f"{sum(found.values()):,} statements in {len(found)} rooms, within budget")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
