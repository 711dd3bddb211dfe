"""What is assumed of devices and what was measured on them: the package's table, results/devices and results/gpu."""

import json
import statistics
from pathlib import Path

from levers_docs import ROOT, table

from hf_memopt.hardware.constants import MEASURABLE, TABLE, Constant, show_value
from hf_memopt.hardware.measured import DeviceFile, read_device_file

RESULTS = ROOT / "benchmarks" / "results"
_NOTHING = "Measured on these cards: nothing yet."
_BYTES = ("allocated_bytes", "reserved_bytes", "device_bytes")


def assumptions() -> str:
    """A line a row of the table of constants."""
    rows = [[f"`{row.name}`", _value(row), row.unit, _where(row), row.source] for row in TABLE]
    return table(["constant", "value", "unit", "where", "source"], rows)


def _value(row: Constant) -> str:
    return f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:g}"


def _where(row: Constant) -> str:
    """Of rows with one name the first that applies counts."""
    backends = ", ".join(row.backends or ())
    if row.architectures is not None:
        return f"{backends}, {', '.join(row.architectures)}"
    if row.capability is None:
        return backends or "elsewhere" if _has_several(row.name) else backends or "everywhere"
    lowest, highest = row.capability
    return f"{backends}, compute capability {lowest:g} {'and later' if highest > 90 else f'to {highest:g}'}"


def _has_several(name: str) -> bool:
    return sum(row.name == name for row in TABLE) > 1


def measured_cards(results: Path = RESULTS) -> str:
    """Constants by device (devices/*.json), then errors by device (gpu/*/tables.json); else that there are none.

    Args:
        results: the folder of results.
    """
    files = [(path, read_device_file(path)) for path in sorted((results / "devices").glob("*.json"))]
    parts = [_constants([file for _, file in files])] if files else []
    measured = [
        (path.parent, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((results / "gpu").glob("*/results.json"))
    ]
    measured = [(folder, content) for folder, content in measured if not content["rehearsal"]]
    return "\n\n".join(parts + ([_errors(measured)] if measured else [])) or _NOTHING


def _constants(files: list[DeviceFile]) -> str:
    names = [name for name in MEASURABLE if any(name in file.constants for file in files)]
    heads = ["device", *(MEASURABLE[name].label for name in names), "reserved bytes off by", "measured"]
    rows = [
        [
            file.device["label"],
            *(show_value(name, file.constants[name]) if name in file.constants else "" for name in names),
            _range(list(file.reserved_errors)),
            file.source.partition("(")[2].rstrip(")"),
        ]
        for file in files
    ]
    return table(heads, rows)


def _errors(measured: list[tuple[Path, dict]]) -> str:
    rows = []
    for folder, content in measured:
        path = folder / "tables.json"
        tables = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        jobs = tables.get("Memory, predicted beside measured", [])
        errors = {name: [job[f"error of {name}"] for job in jobs if f"error of {name}" in job] for name in _BYTES}
        dates = [row["date"] for row in content["rows"]]
        rows.append(
            [
                content["hardware"]["label"],
                str(len(content["rows"])),
                *(_error(errors[name]) for name in _BYTES),
                f"{max(dates, default='')}, torch {content['versions'].get('torch')}, driver {content['driver']}",
            ]
        )
    heads = ["device", "cases", "allocated", "reserved", "device", "measured"]
    return f"{table(heads, rows)}\n\nErrors of predictions: the median, and the range."


def _error(values: list[float]) -> str:
    return f"{statistics.median(map(abs, values)):.1%} ({_range(values)})" if values else ""


def _range(values: list[float]) -> str:
    return f"{min(values):+.1%} to {max(values):+.1%}".replace("-", "−") if values else ""


TABLES = {"assumptions": assumptions, "measured cards": measured_cards}
