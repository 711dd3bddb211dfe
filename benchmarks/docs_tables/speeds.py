"""docs/plans.md and docs/grpo.md: predicted speeds beside published runs."""

import speed_generated
from docs_tables.markdown import listed, predicted, results, shown, table
from speed_published import groups, held_out, summary

from hf_memopt.hardware import get_hardware

_HEADS = ["published runs", "card family", "rows", "median error", "worst", "stated", "pairs ranked right"]
_GENERATED = ["runs", "rows", "median error", "within 20%", "worst", "within the stated interval"]
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


def steps_of_grpo() -> str:
    """The well documented runs of GRPO, and the errors of all runs by what is known of them."""
    rows = results("speed_generated")["rows"]
    groups = speed_generated.by_group(rows)
    runs = [
        [
            row["model"].rpartition("/")[2],
            row["framework"].split(",")[0],
            f"{row['processes']} × {get_hardware(row['gpu']).label}",
            row["method"],
            *(f"{row[key]:.0f}" for key in ("measured_seconds", "predicted_seconds")),
            f"{row['error']:+.0%}",
            f"{row['generation_share']:.0%}",
            "yes" if name == speed_generated.HELD_BACK else "",
        ]
        for name in (speed_generated.HELD_BACK, speed_generated.OPEN)
        for row in groups[name]
    ]
    errors = [
        [
            name,
            *(f"{found[key]:.0%}" if key != "rows" else str(found[key]) for key in ("rows", "median_size", "near")),
            f"{found['worst']:+.0%}",
            f"{found['within']} of {found['rows']}",
        ]
        for name, found in ((name, speed_generated.summary(group)) for name, group in groups.items())
    ]
    heads = [
        "model",
        "run by",
        "cards",
        "method",
        "published (s)",
        "predicted (s)",
        "error",
        "generation",
        "held back",
    ]
    tables = table(heads, runs), table(_GENERATED, errors)
    return "\n\n".join(tables).replace("%", " %")


def plans_of_grpo() -> str:
    """Plans beside the settings that authors ran."""
    named = {row["id"]: row for row in results("speed_generated")["rows"]}

    def run(row: dict) -> str:
        source = named[row["id"]]
        device = get_hardware(source["gpu"]).label
        return f"[{source['model'].rpartition('/')[2]}]({source['source']}), {source['processes']} × {device}"

    columns = {
        "run": run,
        "author's settings": "{author_settings}",
        "seconds a step": shown("author_step_seconds", scale=1),
        "the plan's fastest": "{plan_settings}",
        "seconds": shown("plan_step_seconds", scale=1),
        "GiB of the device": shown("plan_device_bytes"),
    }
    return f"{listed(results('grpo_plans')['rows'], columns)}\n\n{predicted('grpo_plans')}"
