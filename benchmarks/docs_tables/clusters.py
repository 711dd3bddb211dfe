"""docs/clusters.md: engines measured, cluster presets and offloading predicted."""

from docs_tables.markdown import GB, GIB, gib, listed, measured, predicted, results, shown, table


def engines() -> str:
    """Real processes of every engine, compared with one process and with the estimate."""
    columns = {
        "strategy": "{strategy}",
        "processes": "{processes}",
        "MB on the peak rank": lambda row: f"{max(row['measured_bytes']) / 1e6:.2f}",
        "largest error of the estimate, any rank": lambda row: f"{100 * row['largest_error']:+.3f} %",
        "largest loss difference from one process": "{largest_loss_difference:g}",
    }
    return f"{listed(results('engines')['rows'], columns)}\n\n{measured('engines')}"


def clusters() -> str:
    """Cluster presets under every engine."""

    def need(row: dict) -> str:
        if "refused" in row:
            return "refused"
        fits = "" if row["device_bytes"] <= row["capacity_bytes"] else ", does not fit"
        return f"{gib(row['device_bytes'])} of {gib(row['capacity_bytes'])}{fits}"

    columns = {
        "strategy": "{strategy}",
        "GiB per device": need,
        "GiB of host memory per process": lambda row: row.get("refused") or f"{row['host_bytes'] / GIB:.0f}",
    }
    jobs: dict[str, list[dict]] = {}
    for row in results("clusters")["rows"]:
        jobs.setdefault(f"`{row['preset']}`, {row['method']}, `{row['model']}`:", []).append(row)
    parts = [f"{job}\n\n{listed(rows, columns)}" for job, rows in jobs.items()]
    return "\n\n".join([*parts, predicted("clusters")])


def offloading() -> str:
    """The predicted cost of offloading, and what guides say."""
    rows = results("offloading")["rows"]
    places = list(dict.fromkeys(place for row in rows for place in row["times_as_long"]))
    lines = [
        [
            f"`{row['model']}` on `{row['hardware']}`",
            row["strategy"].replace("none", "one device"),
            f"{row['tokens_of_a_device']:,}",
            *(shown(place, ".2f", 1)(row["times_as_long"]) for place in places),
        ]
        for row in rows
    ]
    lines = [line[:3] + [f"{factor} ×" if factor else "" for factor in line[3:]] for line in lines]
    lines.append(["guides say", "", "", "2–3 ×, 10–20 ×", "5–10 ×", "5–10 ×"])
    heads = ["job", "without offloading", "tokens per device and step", *places]
    return f"{table(heads, lines)}\n\n{predicted('offloading')}"


def long_samples() -> str:
    """One sample of a million tokens that eight devices share, published and predicted."""

    def seconds(row: dict) -> str:
        published = row.get("step_seconds")
        return published and f"{row['predicted_seconds']:.0f} ({'–'.join(map(str, published))} published)"

    columns = {
        "model": lambda row: row["model"] + (", layers' inputs in host memory" if row["offload"] else ""),
        "GB published": lambda row: f"{row['peak_gb']} ({row['source']})",
        "GB predicted: tensors": shown("allocated_bytes", scale=GB),
        "GB predicted: device": shown("device_bytes", scale=GB),
        "seconds a step": lambda row: seconds(row) or "",
    }
    return f"{listed(results('long_samples')['rows'], columns)}\n\n{predicted('long_samples')}"


def large_plans() -> str:
    """Plans of long samples and large models on several cards."""
    columns = {
        "job": lambda row: f"`{row['model']}` on `{row['hardware']}`, {row['samples']} × {row['tokens']:,} tokens",
        "settings": "{settings}",
        "GiB of each device": shown("device_bytes"),
        "GiB of host memory a process": shown("host_bytes"),
        "seconds a step": shown("step_seconds", scale=1),
        "tokens/s, not compared": shown("tokens_per_second", ",.0f", 1),
    }
    return f"{listed(results('large_plans')['rows'], columns)}\n\n{predicted('large_plans')}"


TABLES = {
    "engines": engines,
    "long samples": long_samples,
    "large plans": large_plans,
    "predicted": clusters,
    "offloading": offloading,
}
