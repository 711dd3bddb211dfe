"""A table a part from results.json and predictions.json: predicted beside measured, errors by kind."""

import json
import statistics
from pathlib import Path

from benchmarks.gpu.case import load
from hf_memopt.contrib.calibration.measurements import predicted_reserved
from hf_memopt.files import write_whole

GIB = 2**30
PREDICTED = ("estimator", "speed")  # parts whose settings are training jobs
BYTES = ("allocated_bytes", "reserved_bytes", "device_bytes")


def write_tables(folder: Path) -> None:
    """Write tables.json and tables.md of a device's folder."""
    results = load(folder / "results.json")
    predictions = folder / "predictions.json"
    tables = build(results, load(predictions) if predictions.is_file() else {})
    write_whole(folder / "tables.json", json.dumps(tables, indent=1) + "\n")
    write_whole(folder / "tables.md", as_markdown(results, tables))


def build(results: dict, predictions: dict) -> dict[str, list[dict]]:
    """Title -> rows, each a dict of column to value.

    Args:
        predictions: settings as sorted JSON -> what was predicted for them.
    """
    rows = [row for row in results["rows"] if row["outcome"] == "measured"]
    keys = [json.dumps(row["settings"], sort_keys=True) for row in rows]
    jobs = [
        (row, predictions[key])
        for row, key in zip(rows, keys, strict=True)
        if row["part"] in PREDICTED and key in predictions
    ]
    refused = [(row, predicted["refused"]) for row, predicted in jobs if "refused" in predicted]
    jobs = [(row, predicted) for row, predicted in jobs if "refused" not in predicted]
    errors = [errors_of(row, predicted) for row, predicted in jobs]
    tables = {"Memory, predicted beside measured": errors, "Error by kind": by_kind(errors), "Speed": speeds(jobs)}
    for part in ("smaller", "oom", "levers", "allocator", "two_cards"):
        tables[part] = [
            {"case": row["case"].partition("/")[2], **flat(row["measured"])} for row in rows if row["part"] == part
        ]
    tables["Not predicted"] = [{"case": row["case"], "reason": reason} for row, reason in refused]
    left = [row for row in results["rows"] if row["outcome"] != "measured"]
    tables["Not measured"] = [
        {"case": row["case"], "outcome": row["outcome"], "reason": row["reason"][-200:].replace("\n", " ")}
        for row in left
    ]
    return {title: table for title, table in tables.items() if table}


def errors_of(row: dict, predicted: dict) -> dict:
    """A job's bytes and relative errors; reserved bytes by the allocator that was in force."""
    measured = row["measured"]
    reserved = predicted_reserved({**measured, "predicted": predicted})
    predicted = {**predicted, "reserved_bytes": reserved, "device_bytes": reserved + predicted["beside_bytes"]}
    found = {"case": row["case"], "kind": row["settings"]["kind"], "outcome": measured["outcome_of_training"]}
    for name in BYTES:
        if measured[name] and measured["outcome_of_training"] == "trained":
            found[f"measured {name}"], found[f"predicted {name}"] = measured[name], predicted[name]
            found[f"error of {name}"] = round(predicted[name] / measured[name] - 1, 4)
    return found


def by_kind(errors: list[dict]) -> list[dict]:
    """Mean and largest absolute error of every kind of setting, and of all."""
    found = []
    for kind in [*dict.fromkeys(row["kind"] for row in errors), "all"]:
        line = {"kind": kind}
        for name in BYTES:
            column = f"error of {name}"
            values = [abs(row[column]) for row in errors if kind in (row["kind"], "all") and column in row]
            if values:
                line |= {
                    "jobs": len(values),
                    f"mean {column}": round(statistics.mean(values), 4),
                    f"largest {column}": round(max(values), 4),
                }
        found.append(line)
    return found


def speeds(jobs: list[tuple[dict, dict]]) -> list[dict]:
    """Seconds a step, and how many times the prediction is beside the median such factor: ratios are what counts."""
    timed = [
        (row, predicted, predicted["step_seconds"] / row["measured"]["step_seconds"])
        for row, predicted in jobs
        if row["measured"]["step_seconds"]
    ]
    usual = statistics.median([factor for *_, factor in timed]) if timed else 1.0
    return [
        {
            "case": row["case"],
            "tokens_per_second": round(row["measured"]["tokens_per_second"]),
            "step_seconds": round(row["measured"]["step_seconds"], 4),
            "predicted_step_seconds": round(predicted["step_seconds"], 4),
            "predicted over measured": round(factor, 3),
            "beside the median": round(factor / usual, 3),
        }
        for row, predicted, factor in timed
    ]


def flat(measured: dict) -> dict:
    """Nested values by dotted names."""
    found = {}
    for name, value in measured.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": item for inner, item in flat(value).items()}
        else:
            found[name] = value
    return found


def as_markdown(results: dict, tables: dict[str, list[dict]]) -> str:
    """The page: what it was measured on, then the tables."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items() if number)
    lines = [
        f"# {results['hardware']['label']}",
        "",
        *(
            ["**A rehearsal on a CPU with tiny models: these figures say nothing about a card.**", ""]
            if results["rehearsal"]
            else []
        ),
        f"Driver {results['driver']}, CUDA {results['cuda']}; {versions}. `{results['command']}`",
        "",
    ]
    for title, rows in tables.items():
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines += [f"## {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(shown(name, row.get(name)) for name in columns)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def shown(column: str, value) -> str:
    """A cell."""
    if value is None:
        return ""
    if column.endswith("bytes") and "error" not in column and isinstance(value, int | float):
        return f"{value / GIB:.3f} GiB" if value > GIB // 10 else f"{value:,} B"
    if "error of" in column:
        return f"{value:+.2%}"
    return str(value).replace("|", "\\|").replace("\n", " ")
