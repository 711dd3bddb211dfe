"""docs/estimate.md: scripts and model types, predicted beside measured."""

import statistics

from docs_tables.markdown import (
    escaped,
    link,
    listed,
    results,
    table,
    versions,
)

# Why a script is more than 1 % off: read in the sources.
SCRIPT_CAUSES = {
    "run_translation": "label smoothing uses the logits twice: autograd adds the second gradient to the first in "
    "place on real tensors, and makes a third on traced ones",
}


def scripts() -> str:
    """Every script: measured, predicted, error, what the dry-run took."""
    data = results("estimator_scripts")
    columns = {
        "script": "[{script}](../tests/scripts/{script}.py)",
        "kind": lambda row: escaped(row["kind"].rstrip(".")),
        "measured (bytes)": "{measured_bytes:,}",
        "predicted (bytes)": "{predicted_bytes:,}",
        "error": "{error:+.2%}",
        "dry-run (CPU s)": "{cpu_seconds:.0f}",
        "known cause": lambda row: SCRIPT_CAUSES.get(row["script"], ""),
    }
    rows = sorted(data["rows"], key=lambda row: row["script"])
    errors = [abs(row["error"]) for row in rows]
    return (
        f"{listed(rows, columns)}\n\n{len(rows)} scripts: median {statistics.median(errors):.4%}, largest "
        f"{max(errors):.2%}; files that the dry-runs left: {sum(len(row['written']) for row in rows)}. "
        f"Measured with {versions(data)}: {link(data)}."
    )


def model_types() -> str:
    """Per task: answers, refusals and failures, and how far off the measured ones are; then every refusal's reason."""
    data = results("estimator_model_types")
    outcomes = ("answered", "refused", "failed", "no model")
    lines = []
    for task in [*dict.fromkeys(row["task"] for row in data["rows"]), None]:
        rows = [row for row in data["rows"] if task in (row["task"], None)]
        errors = [abs(row["error"]) for row in rows if "error" in row]
        counts = [len(rows), *(sum(row["outcome"] == outcome for row in rows) for outcome in outcomes), len(errors)]
        off = [f"{statistics.median(errors):.3%}", f"{max(errors):.2%}"] if errors else ["", ""]
        lines.append([f"`{task}`" if task else "all", *map(str, counts), *off])
    reasons = [
        f"* `{row['model_type']}`, {row['task']}: {row['reason'].replace('|', '/')}"
        for row in data["rows"]
        if row["outcome"] not in ("answered", "no model")
    ]
    heads = ["task", "model types", *outcomes, "measured", "median error", "largest error"]
    return "\n".join(
        [
            f"{table(heads, lines)}\n",
            "No model: transformers itself makes none from the defaults of the configuration's class (a package is "
            f"missing, or a size has no default). transformers {data['versions']['transformers']}; every row: "
            f"{link(data)}.\n\nRefused, and why:\n",
            *reasons,
        ]
    )


def own_script() -> str:
    """A script in the shape of transformers' run_clm.py: predicted without its weights, then really trained."""
    columns = {
        "predicted peak of run_clm.py (bytes)": "{predicted_bytes:,}",
        "measured on a CPU (bytes)": "{measured_bytes:,}",
        "error": "{error:+.2%}",
    }
    rows = [row for row in results("estimator_scripts")["rows"] if row["script"] == "run_clm"]
    return f"{listed(rows, columns)}\n\n[All scripts](estimate.md#a-script-of-your-own)."


TABLES = {"model types": model_types, "scripts": scripts}
