"""memory_report.html: what a run took, when, why, and what to try next; and runs side by side."""

from collections import Counter
from pathlib import Path
from typing import Any

from hf_memopt import charts
from hf_memopt.files import write_whole
from hf_memopt.levers.arguments import PROFILES, THRESHOLDS
from hf_memopt.oom.events import describe_event
from hf_memopt.reports.next_steps import speed, suggest_next_steps
from hf_memopt.reports.page import render_page, size
from hf_memopt.reports.run import Run, read_run
from hf_memopt.reports.slow import data_wait_share
from hf_memopt.terminal import plain

PAGE = "memory_report.html"
# Fields of TrainingArguments that decide memory.
_DECISIVE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    "bf16",
    "fp16",
    "optim",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "torch_compile",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "torch_empty_cache_steps",
    "use_liger_kernel",
    "eval_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "learning_rate",
)


def write_run_report(directory: str | Path) -> Path:
    """Write memory_report.html into a run's folder, from what lies there.

    Returns:
        The file.

    Raises:
        InputError: the folder holds no run.
    """
    run = read_run(directory)
    path = run.folder / PAGE
    write_whole(path, run_page(run))
    return path


def run_page(run: Run) -> str:
    """A run as one HTML page."""
    report = run.report
    estimate, measured = report.get("estimate") or {}, report.get("measured", {})
    settings = report.get("settings", {})
    failed = next((event for event in run.events if event.get("event") == "out_of_memory"), None)
    capacity = report.get("hardware", {}).get("memory_bytes") or _logged_capacity(run)
    thresholds = _thresholds(report)
    return render_page(
        "run",
        name=run.name,
        subtitle=_subtitle(report),
        verdict=_verdict(run, failed),
        failed=failed is not None,
        facts=_facts(run),
        next=suggest_next_steps(run),
        chart_over_time=_chart(run, thresholds, capacity),
        words=_words(run, capacity),
        chart_by_phase=_chart_by_phase(report, estimate),
        note=_note(run),
        capacity=capacity,
        thresholds=[(name, f"{share:.0%}", size(share * capacity)) for name, share in thresholds.items()],
        readings=[
            (
                one["step"],
                one.get("phase", ""),
                size(one["allocated"]),
                size(one["peak_allocated"]),
                size(one.get("free")),
                one.get("status", ""),
            )
            for one in run.readings
        ],
        compared=_compared(estimate, measured),
        phases=_phases(estimate, measured),
        breakdown={kind: taken for kind, taken in estimate.get("breakdown", {}).items() if taken},
        peak_phase=estimate.get("phase", ""),
        notes=estimate.get("notes", []),
        colours=charts.COLOURS,
        events=[_event(event) for event in run.events],
        speed=_speed(run),
        losses=[(step, f"{loss:.4f}") for step, loss in report.get("held_out_loss", {}).items()],
        settings=_settings(report),
        everything=[(name, value) for name, value in settings.items() if value not in (None, "", [], {})],
        machine=_machine(report),
    )


def compare_page(runs: list[Run]) -> str:
    """Runs side by side as one HTML page."""
    names = _names(runs)
    rows = {name: figures(run) for name, run in zip(names, runs, strict=True)}
    told = [key for key in next(iter(rows.values())) if any(row[key] is not None for row in rows.values())]
    logged = {name: run.readings for name, run in zip(names, runs, strict=True) if run.readings}
    made = None
    if logged:
        made = charts.both(lambda axes, narrow: charts.compared(axes, narrow, logged), "runs")
    return render_page(
        "runs",
        names=names,
        figures=[
            [key.removesuffix("_bytes").replace("_", " ")] + [_cell(key, row[key]) for row in rows.values()]
            for key in told
        ],
        differences=[[key, *map(str, values)] for key, values in differences(runs).items()],
        chart_of_all=made,
    )


def figures(run: Run) -> dict[str, Any]:
    """What runs are compared by: bytes, tokens a second, losses, numbers of events; None for what is not known."""
    report, measured = run.report, run.report.get("measured", {})
    estimate = report.get("estimate") or {}
    losses = report.get("held_out_loss", {})
    quick = speed(run)
    counted = Counter(event.get("event") for event in run.events) + run.left_out
    return {
        "steps": report.get("global_step") or (run.readings[-1]["step"] if run.readings else None),
        "predicted_peak_allocated_bytes": estimate.get("peak_allocated_bytes"),
        "peak_allocated_bytes": measured.get("peak_allocated_bytes"),
        "peak_reserved_bytes": measured.get("peak_reserved_bytes"),
        "peak_host_bytes": measured.get("peak_host_bytes"),
        "tokens_per_second": quick and quick[0],
        "data_wait_share": data_wait_share(run),
        "held_out_loss": list(losses.values())[-1] if losses else None,
        "recovered_out_of_memory": counted["oom_recovered"],
        "ended_out_of_memory": counted["out_of_memory"],
    }


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs: name -> the value of each."""
    told = []
    for run in runs:
        report = run.report
        told.append(
            {name: report.get(name) for name in ("preset", "method", "strategy")}
            | report.get("settings", {})
            | (report.get("memory_arguments") or {})
        )
    names = dict.fromkeys(name for one in told for name in one)
    apart = {"output_dir", "run_name", "logging_dir"}
    values = {name: [one.get(name) for one in told] for name in names if name not in apart}
    return {name: given for name, given in values.items() if len(set(map(str, given))) > 1}


def _names(runs: list[Run]) -> list[str]:
    """The folders' names, longer where two are alike."""
    short = [run.name for run in runs]
    return short if len(set(short)) == len(short) else [plain(str(run.folder)) for run in runs]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if key.endswith("_bytes"):
        return size(value)
    if key.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:,.4g}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def _subtitle(report: dict[str, Any]) -> str:
    told = [
        report.get("model"),
        report.get("preset") and f"preset {report['preset']}",
        report.get("method"),
        report.get("hardware", {}).get("label"),
        report.get("date"),
    ]
    return " · ".join(str(one) for one in told if one)


def _verdict(run: Run, failed) -> str:
    if failed:
        why = f": {failed['reason']}" if failed.get("reason") else ""
        return (
            f"Ended out of memory in {failed.get('stage')} of step {(failed.get('step') or 0) + 1}{why}. "
            f"{failed.get('cause', '')}"
        )
    found = figures(run)
    steps = f"{found['steps'] or 0} steps"
    peak = found["peak_allocated_bytes"] or (max((one["peak_allocated"] for one in run.readings), default=None))
    told = f"Ran {steps}. Peak {size(peak)} allocated, measured"
    if found["predicted_peak_allocated_bytes"] and found["peak_allocated_bytes"]:
        apart = found["predicted_peak_allocated_bytes"] / found["peak_allocated_bytes"] - 1
        told += f"; predicted {size(found['predicted_peak_allocated_bytes'])} ({_signed(apart, 1)})"
    recovered = found["recovered_out_of_memory"]
    return f"{told}. Recovered from running out of memory {recovered} times." if recovered else f"{told}."


def _facts(run: Run) -> list[tuple[str, str]]:
    found = figures(run)
    capacity = run.report.get("hardware", {}).get("memory_bytes")
    told = [
        ("peak allocated", "peak_allocated_bytes"),
        ("peak reserved", "peak_reserved_bytes"),
        ("peak of the host", "peak_host_bytes"),
        ("tokens a second", "tokens_per_second"),
        ("share of a step's time waiting for data", "data_wait_share"),
        ("held-out loss", "held_out_loss"),
        ("steps", "steps"),
    ]
    facts = [(title, _cell(key, found[key])) for title, key in told if found[key] is not None]
    return facts + ([("memory of the device", size(capacity))] if capacity else [])


def _thresholds(report: dict[str, Any]) -> dict[str, float]:
    given = report.get("memory_arguments") or dict(zip(THRESHOLDS, PROFILES["balanced"], strict=True))
    short = ("target", "warning", "critical", "emergency")
    return {name: given[field] for name, field in zip(short, THRESHOLDS, strict=True) if given.get(field)}


def _chart(run: Run, thresholds, capacity: int):
    if not run.readings:
        return None
    predicted = (run.report.get("estimate") or {}).get("peak_allocated_bytes") if _own_allocator(run.report) else None
    steps = sorted({event["step"] for event in run.events if "step" in event})
    return charts.both(
        lambda axes, narrow: charts.over_time(axes, narrow, run.readings, thresholds, capacity, predicted, steps),
        "time",
    )


def _chart_by_phase(report: dict[str, Any], estimate: dict[str, Any]):
    timeline = [tuple(one) for one in report.get("predicted_timeline") or ()]
    if not timeline:
        return None
    peak = estimate.get("peak_allocated_bytes", max(taken for _, taken in timeline))
    return charts.both(lambda axes, narrow: charts.by_phase(axes, narrow, timeline, peak), "phases")


def _own_allocator(report: dict[str, Any]) -> bool:
    """Whether readings count tensors; on a CPU they are the process's resident memory."""
    return "peak_reserved_bytes" in report.get("measured", {})


def _words(run: Run, capacity: int) -> str:
    if not run.readings:
        return ""
    first, last = run.readings[0], run.readings[-1]
    top = max(one["peak_allocated"] for one in run.readings)
    share = f", {top / capacity:.0%} of {size(capacity)}" if capacity else ""
    return (
        f"Line chart of memory over time: {size(first['allocated'])} at step {first['step']}, "
        f"{size(last['allocated'])} at step {last['step']}, at most {size(top)}{share}."
    )


def _note(run: Run) -> str:
    thinned = f" {len(run.readings)} of {run.logged} readings." if run.logged > len(run.readings) else ""
    if not run.report or _own_allocator(run.report):
        return f"Allocated by this process's tensors, as each logging step, evaluation and save found it.{thinned}"
    return (
        "Resident memory of the process, which on a CPU also holds Python and its libraries; predicted and measured "
        f"below count tensors alone.{thinned}"
    )


def _compared(estimate: dict[str, Any], measured: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for name, value in measured.items():
        if not name.endswith("_bytes"):
            continue
        told = estimate.get(name)
        apart = _signed(told / value - 1, 2) if told and value else ""
        rows.append((name.removesuffix("_bytes").replace("_", " "), size(told) if told else "", size(value), apart))
    return rows


def _signed(share: float, digits: int) -> str:
    """A share as a percentage with its sign; a zero has none."""
    percent = round(100 * share, digits) + 0.0
    return f"{percent:{'+' if percent else ''}.{digits}f} %"


def _phases(estimate: dict[str, Any], measured: dict[str, Any]) -> list[tuple[str, ...]]:
    told, found = estimate.get("phases", {}), measured.get("phases", {})
    names = [name for name in told if name not in ("start", "between")]
    names += [name for name in found if name not in names]
    return [
        (name, size(told[name]) if name in told else "", size(found[name]) if name in found else "") for name in names
    ]


def _event(event: dict[str, Any]) -> tuple[str, ...]:
    return str(event.get("step", "")), event.get("event", "").replace("_", " "), describe_event(event)


def _logged_capacity(run: Run) -> float:
    return run.readings[-1].get("capacity", 0) if run.readings else 0


def _speed(run: Run) -> tuple[str, ...] | None:
    found = speed(run)
    return found and (*(f"{value:,.0f}" for value in found[:3]), str(found[3]))


def _settings(report: dict[str, Any]) -> list[tuple[str, Any]]:
    settings = report.get("settings", {})
    rows = [(name, report[name]) for name in ("preset", "method", "strategy", "command") if report.get(name)]
    rows += [(name, settings[name]) for name in _DECISIVE if settings.get(name) not in (None, "", {}, [], False)]
    return rows + [(name, value) for name, value in (report.get("levers") or {}).items()]


def _machine(report: dict[str, Any]) -> list[tuple[str, str]]:
    hardware = report.get("hardware", {})
    if not hardware:
        return []
    return [(hardware.get("label", ""), size(hardware.get("memory_bytes"))), *report.get("versions", {}).items()]
