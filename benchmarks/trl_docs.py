"""The predicted table of docs/trl.md."""

from levers_docs import results, table

GIB = 2**30
KINDS = ("parameters", "gradients", "optimizer_states", "activations", "logits")


def trainers() -> str:
    """Every job: what it takes, at the peak, and on which cards it fits."""
    data = results("trl")
    cards = {row["card"]: row["capacity_bytes"] for row in data["rows"] if "card" in row}
    rows = []
    for job in (row for row in data["rows"] if "task" in row):
        fields = ", ".join(f"`{name}={value}`" for name, value in job["fields"].items())
        size = job["device_bytes"]
        fits = ["yes" if size <= capacity else "no" for capacity in cards.values()]
        held = [f"{job['breakdown'][kind] / GIB:.1f}" for kind in KINDS]
        rows.append(
            [job["task"], job["method"], f"{job['samples']}", f"{job['tokens']:,}", fields, f"**{size / GIB:.1f}**"]
        )
        rows[-1] += [*held, *fits]
    heads = ["task", "method", "samples", "tokens", "settings", "device (GiB)"]
    heads += [kind.replace("_", " ") for kind in KINDS]
    heads += [f"{name} ({capacity / GIB:.1f} GiB)" for name, capacity in cards.items()]
    model = next(row["model"] for row in data["rows"] if "task" in row)
    versions = data["versions"]
    return (
        f"{table(heads, rows)}\n\n{model}, predicted {data['date']} with torch {versions['torch']}, transformers "
        f"{versions['transformers']}: [trl.json](../benchmarks/results/trl.json)."
    )


def published() -> str:
    """Peaks that TRL's pull requests and notebooks state, beside predictions for the installed version."""
    rows = [
        [
            f"{row['task']}: {row['model']}, {row['gpu']}",
            row["versions"],
            row["inferred"],
            f"{row['peak_bytes'] / GIB:.1f} {row['metric'].split('_')[1]}",
            f"{row['predicted_bytes'] / GIB:.1f}",
            f"{row['above_bytes_per_logit']:.1f}",
        ]
        for row in results("trl_published")["rows"]
    ]
    heads = ["job", "measured with", "inferred", "published (GiB)", "predicted (GiB)"]
    return table([*heads, "published above predicted (bytes a logit)"], rows)


TABLES = {"trl trainers": trainers, "trl published": published}
