"""The table of model types in docs/estimate.md."""

import statistics
from collections import defaultdict

from levers_docs import results, table

_OUTCOMES = ("answered", "refused", "failed", "no model")


def model_types() -> str:
    """Per task: answers, refusals and failures, and how far off the measured ones are; then every refusal's reason."""
    result = results("estimator_model_types")
    by_task = defaultdict(list)
    for row in result["rows"]:
        by_task[row["task"]].append(row)
    rows = [_summary(f"`{task}`", part) for task, part in by_task.items()] + [_summary("all", result["rows"])]
    heads = ["task", "model types", *_OUTCOMES, "measured", "median error", "largest error"]
    refused = [row for row in result["rows"] if row["outcome"] not in ("answered", "no model")]
    reasons = "\n".join(
        f"* `{row['model_type']}`, {row['task']}: {row['reason'].replace('|', '/')}" for row in refused
    )
    return (
        f"{table(heads, rows)}\n\n"
        "No model: transformers itself makes none from the defaults of the configuration's class (a package is "
        f"missing, or a size has no default). transformers {result['versions']['transformers']}; every row: "
        f"[estimator_model_types.json](../benchmarks/results/estimator_model_types.json).\n\n"
        f"Refused, and why:\n\n{reasons}"
    )


def _summary(name: str, rows: list[dict]) -> list[str]:
    errors = [abs(row["error"]) for row in rows if "error" in row]
    counts = [str(sum(row["outcome"] == outcome for row in rows)) for outcome in _OUTCOMES]
    measured = [f"{statistics.median(errors):.3%}", f"{max(errors):.2%}"] if errors else ["", ""]
    return [name, str(len(rows)), *counts, str(len(errors)), *measured]


TABLES = {"model types": model_types}
