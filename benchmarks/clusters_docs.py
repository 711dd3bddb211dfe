"""The measured and predicted tables of docs/clusters.md."""

from levers_docs import results, table
from levers_docs import source as measured

GIB = 2**30


def engines() -> str:
    """Real processes of every engine beside one process and beside the estimate."""
    found = results("engines")
    lines = [
        [
            row["strategy"],
            str(row["processes"]),
            f"{max(row['measured_bytes']) / 1e6:.2f}",
            f"{100 * row['largest_error']:+.3f} %",
            f"{row['largest_loss_difference']:g}",
        ]
        for row in found["rows"]
    ]
    heads = [
        "strategy",
        "processes",
        "MB of the rank that needs most",
        "estimate off by, of any rank at most",
        "losses off one process's by",
    ]
    return f"{table(heads, lines)}\n\n{measured('engines', found)}"


def predicted() -> str:
    """Cluster presets under every engine."""
    found = results("clusters")
    parts = []
    for told in dict.fromkeys((row["preset"], row["method"], row["model"]) for row in found["rows"]):
        lines = []
        for row in found["rows"]:
            if (row["preset"], row["method"], row["model"]) != told:
                continue
            if "refused" in row:
                lines.append([row["strategy"], "refused", row["refused"]])
                continue
            fits = "" if row["device_bytes"] <= row["capacity_bytes"] else ", too much"
            there = f"{row['device_bytes'] / GIB:.1f} of {row['capacity_bytes'] / GIB:.1f}{fits}"
            lines.append([row["strategy"], there, f"{row['host_bytes'] / GIB:.0f}"])
        name, method, model = told
        parts.append(f"`{name}`, {method}, `{model}`:")
        parts.append(table(["strategy", "GiB a device", "GiB of host memory a process"], lines))
    return "\n\n".join([*parts, _source(found)])


def offloading() -> str:
    """What offloading is predicted to cost, beside what guides say."""
    found = results("offloading")
    places = list(dict.fromkeys(place for row in found["rows"] for place in row["times_as_long"]))
    lines = [
        [
            f"`{row['model']}` on `{row['hardware']}`",
            row["strategy"].replace("none", "one device"),
            f"{row['tokens_of_a_device']:,}",
            *(f"{row['times_as_long'][place]:.2f} ×" if place in row["times_as_long"] else "" for place in places),
        ]
        for row in found["rows"]
    ]
    lines.append(["guides say", "", "", "2–3 ×, 10–20 ×", "5–10 ×", "5–10 ×"])
    heads = ["job", "without", "tokens a device and step", *places]
    return f"{table(heads, lines)}\n\n{_source(found)}"


def _source(found: dict) -> str:
    """When predictions were made, with what, and their file."""
    versions, file = found["versions"], f"{found['benchmark']}.json"
    made = f"Predicted {found['date']} with torch {versions['torch']}, transformers {versions['transformers']}"
    return f"{made}: [{file}](../benchmarks/results/{file})."


TABLES = {"engines": engines, "predicted": predicted, "offloading": offloading}
