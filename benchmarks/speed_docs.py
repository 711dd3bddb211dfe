"""The table of published speeds beside predicted ones in docs/plans.md and README.md; fill_docs.py writes it."""

from levers_docs import results
from speed_published import GROUPS, summary

_RAN = {
    "A100, fitted": "Mistral-7B, SantaCoder: full, LoRA, QLoRA on 1 and 2 A100s; five constants were fitted to these",
    "A100": "PowerLM-3B, Mixtral-8x7B: likewise",
    "A100, fused kernels": "all four, with fused kernels that a trace does not have: predictions should be too slow",
    "L40S": "Llama-3.2-3B, full and 33 adapters in batches of 4 short samples, on an L40S",
}


def table() -> str:
    """A row for every group of published runs."""
    lines = [
        "| published runs | rows | median error | worst | within 25% | pairs ranked right | worst regret |",
        "|---|---|---|---|---|---|---|",
    ]
    found = results("speed_published")
    for name, of_group in GROUPS.items():
        rows = list(filter(of_group, found["rows"]))
        regret = _worst_regret(found["regrets"], {row["id"] for row in rows})
        cells = "{rows} | {median:.1%} | {worst:.0%} | {near:.0%} | {pairs}".format(**summary(rows))
        lines.append(f"| {_RAN[name]} | {cells} | {regret:.1%} |")
    return "\n".join(lines).replace("%", " %")


def _worst_regret(regrets: list[dict], ids: set[str]) -> float:
    """What the worst choice among a group's settings loses against the fastest of them."""
    return max((loss["regret"] for loss in regrets if loss["chosen"] in ids), default=0.0)


TABLES = {"published speeds": table}
