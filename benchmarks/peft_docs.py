"""The table of PEFT's adapters in docs/memory.md."""

from levers_docs import results, table

GB = 1e9
# Why a row is far off: read in the sources; what is only inferred says "probably".
CAUSES = {
    "full-finetuning-lr_0.00001": "Adam's states are made at the end of the first step, among cached activations, "
    "whose segments they split; the estimator makes them first",
    "prefixtuning-lr_0.001": "the published peak probably is that of generation for 50 samples: prefixes alone make "
    "its KV cache grow token by token, beside what training has cached, and the 99th percentile over training steps "
    "is lower against the peak than in any other row",
    "frod-sparse0.02-lr_0.001": "probably: projections stay in host memory, and each forward copies them",
}


def adapters() -> str:
    """Every row: measured, predicted, error, and what is known about the largest errors."""
    found = results("estimator_peft")
    rows = [
        [
            f"`{row['name']}`" + (" (fitted)" if row["fitted"] else ""),
            f"{row['measured_bytes'] / GB:.2f}",
            f"{row['predicted_bytes'] / GB:.2f}",
            f"{row['error']:+.1%}",
            f"{row['tokens_per_second']:,.0f}",
            CAUSES.get(row["name"], ""),
        ]
        for row in sorted(found["rows"], key=lambda row: row["name"])
    ]
    heads = ["adapter", "measured (GB)", "predicted (GB)", "error", "tokens/s (measured)", "known cause"]
    first = found["rows"][0]
    return (
        f"{table(heads, rows)}\n\n"
        f"Fitted: the tokens of the longest batch, {first['seq_len']}, on the row marked so. Repeated: PEFT's loop, "
        "which holds the model's outputs through backward with its KV cache on, and AdaLoRA as peft had it then (peft "
        "0.21 trains its `ranknum`, and keeps every adapter's output for backward). Predicted with "
        f"peft {first['versions']['peft']}, transformers {found['versions']['transformers']}; "
        f"measured by PEFT on an L40S with "
        f"{first['published_versions']} or later: [estimator_peft.json](../benchmarks/results/estimator_peft.json)."
    )


TABLES = {"adapters": adapters}
