"""README.md and docs/plans.md: predicted speeds beside published runs."""

from docs_tables.markdown import (
    results,
)
from speed_published import GROUPS, summary

SPEED_GROUPS = {
    "A100, fitted": "Mistral-7B, SantaCoder: full, LoRA, QLoRA on 1 and 2 A100s; five constants were fitted to these",
    "A100": "PowerLM-3B, Mixtral-8x7B: likewise",
    "A100, fused kernels": "all four, with fused kernels that a trace does not have: predictions should be too slow",
    "L40S": "Llama-3.2-3B, full and 33 adapters in batches of 4 short samples, on an L40S",
}


def published_speeds() -> str:
    """A row for every group of published runs."""
    lines = [
        "| published runs | rows | median error | worst | within 25% | pairs ranked right | worst regret |",
        "|---|---|---|---|---|---|---|",
    ]
    data = results("speed_published")
    for name, is_member in GROUPS.items():
        rows = list(filter(is_member, data["rows"]))
        ids = {row["id"] for row in rows}
        # What the worst choice among a group's settings loses against the fastest of them.
        regret = max((loss["regret"] for loss in data["regrets"] if loss["chosen"] in ids), default=0.0)
        cells = "{rows} | {median:.1%} | {worst:.0%} | {near:.0%} | {pairs}".format(**summary(rows))
        lines.append(f"| {SPEED_GROUPS[name]} | {cells} | {regret:.1%} |")
    return "\n".join(lines).replace("%", " %")
