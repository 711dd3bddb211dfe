"""The measured and predicted tables of docs/clusters.md."""

from levers_docs import results, table
from levers_docs import source as measured

GIB = 2**30


def engines() -> str:
    """Real processes of every engine, compared with one process and with the estimate."""
    data = results("engines")
    lines = [
        [
            row["strategy"],
            str(row["processes"]),
            f"{max(row['measured_bytes']) / 1e6:.2f}",
            f"{100 * row['largest_error']:+.3f} %",
            f"{row['largest_loss_difference']:g}",
        ]
        for row in data["rows"]
    ]
    heads = [
        "strategy",
        "processes",
        "MB on the peak rank",
        "largest error of the estimate, any rank",
        "largest loss difference from one process",
    ]
    return f"{table(heads, lines)}\n\n{measured('engines', data)}"


def predicted() -> str:
    """Cluster presets under every engine."""
    data = results("clusters")
    parts = []
    for job in dict.fromkeys((row["preset"], row["method"], row["model"]) for row in data["rows"]):
        lines = []
        for row in data["rows"]:
            if (row["preset"], row["method"], row["model"]) != job:
                continue
            if "refused" in row:
                lines.append([row["strategy"], "refused", row["refused"]])
                continue
            fits = "" if row["device_bytes"] <= row["capacity_bytes"] else ", does not fit"
            need = f"{row['device_bytes'] / GIB:.1f} of {row['capacity_bytes'] / GIB:.1f}{fits}"
            lines.append([row["strategy"], need, f"{row['host_bytes'] / GIB:.0f}"])
        name, method, model = job
        parts.append(f"`{name}`, {method}, `{model}`:")
        parts.append(table(["strategy", "GiB per device", "GiB of host memory per process"], lines))
    return "\n\n".join([*parts, _source(data)])


def offloading() -> str:
    """The predicted cost of offloading, and what guides say."""
    data = results("offloading")
    places = list(dict.fromkeys(place for row in data["rows"] for place in row["times_as_long"]))
    lines = [
        [
            f"`{row['model']}` on `{row['hardware']}`",
            row["strategy"].replace("none", "one device"),
            f"{row['tokens_of_a_device']:,}",
            *(f"{row['times_as_long'][place]:.2f} ×" if place in row["times_as_long"] else "" for place in places),
        ]
        for row in data["rows"]
    ]
    lines.append(["guides say", "", "", "2–3 ×, 10–20 ×", "5–10 ×", "5–10 ×"])
    heads = ["job", "without offloading", "tokens per device and step", *places]
    return f"{table(heads, lines)}\n\n{_source(data)}"


def _source(data: dict) -> str:
    """Date and versions of the predictions, and their file."""
    versions, file = data["versions"], f"{data['benchmark']}.json"
    made = f"Predicted {data['date']} with torch {versions['torch']}, transformers {versions['transformers']}"
    return f"{made}: [{file}](../benchmarks/results/{file})."


TABLES = {"engines": engines, "predicted": predicted, "offloading": offloading}
