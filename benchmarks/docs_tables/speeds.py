"""README.md and docs/plans.md: predicted speeds beside published runs."""

from docs_tables.markdown import results, table
from speed_published import groups, held_out, summary

_HEADS = ["published runs", "card family", "rows", "median error", "worst", "stated", "pairs ranked right"]
_FAMILIES = {"8.0": "A100", "8.6": "RTX A5000", "8.9": "L40S, RTX 4090", "9.0": "H100", "12.0": "RTX PRO 6000"}


def published_speeds() -> str:
    """A row for every kind of jobs and family of cards, of rows to which nothing was fitted; then the others."""
    rows = results("speed_published")["rows"]
    lines = [
        _line(
            kind, _FAMILIES[family], group, f"±{group[0]['stated_error']:.0%}" if group[0]["stated_error"] else "none"
        )
        for (kind, family), group in groups(held_out(rows)).items()
    ]
    fitted = [row for row in rows if row["fitted"]]
    other = [row for row in rows if row["stack"]]
    lines.append(_line("to which constants were fitted", "A100, L40S", fitted, ""))
    lines.append(_line("of other software (compiled, fused kernels)", "19 cards", other, ""))
    return table(_HEADS, lines).replace("%", " %")


def _line(kind: str, family: str, rows: list[dict], stated: str) -> list[str]:
    found = summary(rows)
    figures = [f"{found['median']:+.0%}", f"{found['worst']:+.0%}", stated, found["pairs"]]
    return [kind, family, str(found["rows"]), *figures]
