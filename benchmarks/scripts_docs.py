"""The table of training scripts in docs/estimate.md."""

import statistics

from levers_docs import results, table

# Why a row is more than 1 % off: read in the sources.
CAUSES = {
    "run_translation": "label smoothing uses the logits twice: autograd adds the second gradient to the first in "
    "place on real tensors, and makes a third on traced ones",
}


def scripts() -> str:
    """Every script: measured, predicted, error, what the dry-run took."""
    found = results("estimator_scripts")
    rows = [
        [
            f"[{row['script']}](../tests/scripts/{row['script']}.py)",
            row["kind"].rstrip(".").replace("|", "\\|"),
            f"{row['measured_bytes']:,}",
            f"{row['predicted_bytes']:,}",
            f"{row['error']:+.2%}",
            f"{row['cpu_seconds']:.0f}",
            CAUSES.get(row["script"], ""),
        ]
        for row in sorted(found["rows"], key=lambda row: row["script"])
    ]
    heads = ["script", "kind", "measured (bytes)", "predicted (bytes)", "error", "dry-run (CPU s)", "known cause"]
    errors = [abs(row["error"]) for row in found["rows"]]
    written = sum(len(row["written"]) for row in found["rows"])
    return (
        f"{table(heads, rows)}\n\n"
        f"{len(rows)} scripts: median {statistics.median(errors):.4%}, largest {max(errors):.2%}; files that the "
        f"dry-runs left: {written}. Measured with torch {found['versions']['torch']}, transformers "
        f"{found['versions']['transformers']}: [estimator_scripts.json](../benchmarks/results/estimator_scripts.json)."
    )


TABLES = {"scripts": scripts}
