"""memory_report.html: what memory a run used, when and why, and what to try next; and runs side by side."""

from collections import Counter
from pathlib import Path
from typing import Any

from hf_memopt import charts
from hf_memopt.estimator.timing.duration import time_text
from hf_memopt.files import write_whole
from hf_memopt.levers.arguments import PROFILES, THRESHOLDS
from hf_memopt.oom.events import describe_event
from hf_memopt.reports.next_steps import data_wait_share, speed, suggest_next_steps
from hf_memopt.reports.run import Run, read_run
from hf_memopt.terminal import plain
from hf_memopt.units import size

PAGE = "memory_report.html"
# Fields of TrainingArguments that memory use depends on, shown first.
_MEMORY_SETTINGS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "bf16", "fp16"),
    *("optim", "activation_checkpointing", "activation_checkpointing_kwargs", "torch_compile", "deepspeed", "fsdp"),
    *("fsdp_config", "torch_empty_cache_steps", "use_liger_kernel", "eval_accumulation_steps"),
    *("max_steps", "num_train_epochs", "learning_rate"),
)


def write_run_report(directory: str | Path) -> Path:
    """Write memory_report.html into a run's folder, from the files there.

    Returns:
        Its path.

    Raises:
        InputError: no run wrote to the folder.
    """
    run = read_run(directory)
    path = run.folder / PAGE
    write_whole(path, run_page(run))
    return path


def run_page(run: Run) -> str:
    """The HTML page of one run."""
    report = run.report
    estimate, measured = report.get("estimate") or {}, report.get("measured", {})
    same_batch = report.get("estimate_of_measured_batch")
    settings = report.get("settings", {})
    failed = next((event for event in run.events if event.get("event") == "out_of_memory"), None)
    capacity = report.get("hardware", {}).get("memory_bytes") or (
        run.readings[-1].get("capacity", 0) if run.readings else 0
    )
    thresholds, speeds = _thresholds(report), speed(run)
    passes = len(charts.forward_passes(phase for phase, _ in report.get("predicted_timeline") or ()))
    return render_page(
        "run",
        name=run.name,
        subtitle=_subtitle(report),
        verdict=_verdict(run, failed),
        failed=failed is not None,
        facts=_facts(run),
        left_out=_left_out(report),
        next=suggest_next_steps(run),
        chart_over_time=_chart(run, thresholds, capacity),
        chart_text=_describe_chart(run, capacity),
        chart_by_phase=_chart_by_phase(report, estimate),
        forward_passes=f"{passes} forward pass{'es' * (passes != 1)}",
        note=_note(run),
        capacity=capacity,
        thresholds=[(name, f"{share:.0%}", size(share * capacity)) for name, share in thresholds.items()],
        readings=[
            (
                reading["step"],
                reading.get("phase", ""),
                size(reading["allocated"]),
                size(reading["peak_allocated"]),
                size(reading.get("free")),
                reading.get("status", ""),
            )
            for reading in run.readings
        ],
        compared=_compared(estimate, same_batch or {}, measured, report.get("measured_batch")),
        phases=_phases(same_batch or estimate, measured),
        breakdown={kind: bytes for kind, bytes in estimate.get("breakdown", {}).items() if bytes},
        peak_phase=estimate.get("phase", ""),
        notes=estimate.get("notes", []),
        colours=charts.PARTS,
        events=[
            (str(event.get("step", "")), event.get("event", "").replace("_", " "), describe_event(event))
            for event in run.events
        ],
        speed=speeds and (*(f"{value:,.0f}" for value in speeds[:3]), str(speeds[3])),
        losses=[(step, f"{loss:.4f}") for step, loss in report.get("held_out_loss", {}).items()],
        settings=_settings(report),
        all_settings=[(name, value) for name, value in settings.items() if value not in (None, "", [], {})],
        machine=_machine(report),
    )


def compare_page(runs: list[Run]) -> str:
    """The HTML page that compares runs."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [plain(str(run.folder)) for run in runs]
    rows = {name: figures(run) for name, run in zip(names, runs, strict=True)}
    keys = [key for key in next(iter(rows.values())) if any(row[key] is not None for row in rows.values())]
    logged = {name: run.readings for name, run in zip(names, runs, strict=True) if run.readings}
    chart = charts.both(lambda axes, narrow: charts.compared(axes, narrow, logged), "runs") if logged else None
    return render_page(
        "runs",
        names=names,
        figures=[[_label(key)] + [_cell(key, row[key]) for row in rows.values()] for key in keys],
        differences=[[key, *map(str, values)] for key, values in differences(runs).items()],
        chart_of_all=chart,
    )


def figures(run: Run) -> dict[str, Any]:
    """The figures by which runs are compared: seconds, bytes, tokens/s, losses, event counts; None where unknown."""
    report, measured = run.report, run.report.get("measured", {})
    estimate = report.get("estimate_of_measured_batch") or report.get("estimate") or {}
    losses = report.get("held_out_loss", {})
    tokens_per_second = speed(run)
    counts = Counter(event.get("event") for event in run.events) + run.left_out
    # Of a run that wrote no report: the time that its readings span.
    logged_seconds = run.readings[-1]["time"] - run.readings[0]["time"] if len(run.readings) > 1 else None
    return {
        "steps": report.get("global_step") or (run.readings[-1]["step"] if run.readings else None),
        "training_time_seconds": report.get("train_seconds") or logged_seconds,
        "predicted_peak_allocated_bytes": estimate.get("peak_allocated_bytes"),
        "peak_allocated_bytes": measured.get("peak_allocated_bytes"),
        "peak_reserved_bytes": measured.get("peak_reserved_bytes"),
        "peak_host_bytes": measured.get("peak_host_bytes"),
        "tokens_per_second": tokens_per_second and tokens_per_second[0],
        "data_wait_share": data_wait_share(run),
        "held_out_loss": list(losses.values())[-1] if losses else None,
        "recovered_out_of_memory": counts["oom_recovered"],
        "ended_out_of_memory": counts["out_of_memory"],
    }


def figure_texts(run: Run) -> list[tuple[str, str]]:
    """The known figures of a run, named and with their units."""
    return [(_label(key), _cell(key, value)) for key, value in figures(run).items() if value is not None]


def _label(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Settings that differ between runs: name -> the value in each run."""
    settings = [
        {name: run.report.get(name) for name in ("preset", "method", "strategy")}
        | run.report.get("settings", {})
        | (run.report.get("memory_arguments") or {})
        for run in runs
    ]
    names = dict.fromkeys(name for run_settings in settings for name in run_settings)
    ignored = {"output_dir", "run_name", "logging_dir"}  # differ in every run
    rows = {name: [run_settings.get(name) for run_settings in settings] for name in names if name not in ignored}
    return {name: values for name, values in rows.items() if len(set(map(str, values))) > 1}


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if key.endswith("_bytes"):
        return size(value)
    if key.endswith("_seconds"):
        return time_text(value)
    if key.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:,.4g}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def _subtitle(report: dict[str, Any]) -> str:
    parts = [
        report.get("model"),
        report.get("preset") and f"preset {report['preset']}",
        report.get("method"),
        report.get("hardware", {}).get("label"),
        report.get("date"),
    ]
    return " · ".join(str(part) for part in parts if part)


def _verdict(run: Run, failed) -> str:
    if failed:
        why = f": {failed['reason']}" if failed.get("reason") else ""
        return (
            f"Ended out of memory in {failed.get('stage')} of step {(failed.get('step') or 0) + 1}{why}. "
            f"{failed.get('cause', '')}"
        )
    measured = figures(run)
    model, hardware = run.report.get("model"), run.report.get("hardware", {})
    devices = f"{hardware['devices']} × " if (hardware.get("devices") or 1) > 1 else ""
    job = (f" of {model}" if model else "") + (f" on {devices}{hardware['label']}" if hardware.get("label") else "")
    peak = measured["peak_allocated_bytes"]
    shown = peak or max((reading["peak_allocated"] for reading in run.readings), default=None)
    verdict = f"Ran {measured['steps'] or 0} steps{job}. Peak {size(shown)} allocated, measured"
    if peak and (predicted := measured["predicted_peak_allocated_bytes"]):
        verdict += f"; predicted {size(predicted)} ({_signed(predicted / peak - 1, 1)})"
    if recovered := measured["recovered_out_of_memory"]:
        return f"{verdict}. Recovered from running out of memory {recovered} time{'s' * (recovered > 1)}."
    return f"{verdict}."


def _facts(run: Run) -> list[tuple[str, str]]:
    measured = figures(run)
    capacity = run.report.get("hardware", {}).get("memory_bytes")
    titles = [
        ("peak allocated", "peak_allocated_bytes"),
        ("peak reserved", "peak_reserved_bytes"),
        ("peak host memory", "peak_host_bytes"),
        ("tokens a second", "tokens_per_second"),
        ("share of step time waiting for data", "data_wait_share"),
        ("held-out loss", "held_out_loss"),
        ("steps", "steps"),
        ("training time", "training_time_seconds"),
    ]
    facts = [(title, _cell(key, measured[key])) for title, key in titles if measured[key] is not None]
    return facts + ([("device memory", size(capacity))] if capacity else [])


def _left_out(report: dict[str, Any]) -> list[str]:
    """The rows and videos of the data set that were not trained on, and why; nothing where there are none."""
    rows, videos = report.get("rows", {}), report.get("bad_videos", [])
    dropped = {reason: count for reason, count in rows.get("dropped", {}).items() if count}
    sentences = []
    if dropped:
        of = f" of {rows['total']:,}" if rows.get("total") else ""
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in dropped.items())
        sentences.append(f"Rows left out: {sum(dropped.values()):,}{of}: {reasons}.")
    if videos:
        sentences.append(f"Videos left out: {len(videos):,}: {'; '.join(videos)}.")
    return sentences


def _thresholds(report: dict[str, Any]) -> dict[str, float]:
    shares = report.get("memory_arguments") or dict(zip(THRESHOLDS, PROFILES["balanced"], strict=True))
    short = ("target", "warning", "critical", "emergency")
    return {name: shares[field] for name, field in zip(short, THRESHOLDS, strict=True) if shares.get(field)}


def _chart(run: Run, thresholds, capacity: int):
    if not run.readings:
        return None
    predicted = (run.report.get("estimate") or {}).get("peak_allocated_bytes") if _counts_tensors(run.report) else None
    steps = sorted({event["step"] for event in run.events if "step" in event})
    return charts.both(
        lambda axes, narrow: charts.over_time(axes, narrow, run.readings, thresholds, capacity, predicted, steps),
        "time",
    )


def _chart_by_phase(report: dict[str, Any], estimate: dict[str, Any]):
    timeline = [tuple(point) for point in report.get("predicted_timeline") or ()]
    if not timeline:
        return None
    peak = estimate.get("peak_allocated_bytes", max(size for _, size in timeline))
    return charts.both(lambda axes, narrow: charts.by_phase(axes, narrow, timeline, peak), "phases")


def _counts_tensors(report: dict[str, Any]) -> bool:
    """True if readings are of tensors; on a CPU they are resident memory."""
    return "peak_reserved_bytes" in report.get("measured", {})


def _describe_chart(run: Run, capacity: int) -> str:
    if not run.readings:
        return ""
    first, last = run.readings[0], run.readings[-1]
    top = max(reading["peak_allocated"] for reading in run.readings)
    share = f", {top / capacity:.0%} of {size(capacity)}" if capacity else ""
    return (
        f"Line chart of memory over time: {size(first['allocated'])} at step {first['step']}, "
        f"{size(last['allocated'])} at step {last['step']}, at most {size(top)}{share}."
    )


def _note(run: Run) -> str:
    thinned = f" {len(run.readings)} of {run.logged} readings." if run.logged > len(run.readings) else ""
    if not run.report or _counts_tensors(run.report):
        return f"Memory allocated for this process's tensors at each logging step, evaluation and save.{thinned}"
    return (
        "Resident memory of the process, which on a CPU includes Python and its libraries. The predicted and measured "
        f"peaks count only tensors.{thinned}"
    )


def _compared(
    estimate: dict[str, Any], same_batch: dict[str, Any], measured: dict[str, Any], batch: str | None
) -> dict[str, list] | None:
    """Peaks predicted for the longest samples and for the batch that was measured, measured, and the difference.

    A column a peak: the rows' names are long, and a phone has the width for one column of them.
    """
    names = [name for name in measured if name.endswith("_bytes")]
    if not names:
        return None
    predicted = same_batch or estimate
    known = {name: predicted[name] for name in names if predicted.get(name) and measured[name]}
    relative = [_signed(known[name] / measured[name] - 1, 2) if name in known else "" for name in names]
    rows = [
        ["predicted" + (", longest" if same_batch else ""), *_sizes(estimate, names)],
        *([[f"predicted, {batch}", *_sizes(same_batch, names)]] if same_batch else []),
        ["measured", *_sizes(measured, names)],
        ["difference", *relative],
    ]
    return {"columns": [name.removesuffix("_bytes").replace("_", " ") for name in names], "rows": rows}


def _sizes(bytes_by_name: dict[str, Any], names: list[str]) -> list[str]:
    return [size(bytes_by_name[name]) if bytes_by_name.get(name) else "" for name in names]


def _signed(share: float, digits: int) -> str:
    """A share as a percentage with its sign; none for zero."""
    percent = round(100 * share, digits) + 0.0
    return f"{percent:{'+' if percent else ''}.{digits}f} %"


def _phases(estimate: dict[str, Any], measured: dict[str, Any]) -> list[tuple[str, ...]]:
    predicted, peaks = estimate.get("phases", {}), measured.get("phases", {})
    names = [name for name in predicted if name not in ("start", "between")]
    names += [name for name in peaks if name not in names]

    def cell(sizes: dict[str, int], name: str) -> str:
        return size(sizes[name]) if name in sizes else ""

    return [(name, cell(predicted, name), cell(peaks, name)) for name in names]


def _settings(report: dict[str, Any]) -> list[tuple[str, Any]]:
    settings = report.get("settings", {})
    return [
        *((name, report[name]) for name in ("preset", "method", "strategy", "command") if report.get(name)),
        *((name, settings[name]) for name in _MEMORY_SETTINGS if settings.get(name) not in (None, "", {}, [], False)),
        *(report.get("levers") or {}).items(),
    ]


def _machine(report: dict[str, Any]) -> list[tuple[str, str]]:
    hardware = report.get("hardware", {})
    if not hardware:
        return []
    return [(hardware.get("label", ""), size(hardware.get("memory_bytes"))), *report.get("versions", {}).items()]


_TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, folder: Path = _TEMPLATES, **content: Any) -> str:
    """A complete HTML page; all content is escaped.

    Args:
        template: run or runs, or one of the folder's, which may extend page.html.
        folder: of the template.
        content: the template's variables.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, _TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = size
    return environment.get_template(f"{template}.html").render(**content)
