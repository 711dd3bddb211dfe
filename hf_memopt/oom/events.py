"""Memory events as sentences, for logs and report pages."""

from typing import Any

from hf_memopt.units import size

_LONGEST = 1000  # characters of an unknown event's fields


def describe_event(event: dict[str, Any]) -> str:
    """An event as one sentence; the end of a run as a paragraph."""
    try:
        return _end(event) if event.get("event") == "out_of_memory" else _sentence(event)
    except KeyError:  # written by another version, or by hand
        return _listed(event)


def _listed(fields: dict[str, Any]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in fields.items())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _sentence(event: dict[str, Any]) -> str:
    between_steps = event.get("stage") in ("eval", "save", "resume")
    where = f"after step {event['step']}" if between_steps else f"step {event['step'] + 1}"
    match event["event"]:
        case "oom_recovered":
            text = f"{where}: out of memory in {event['stage']}, recovered"
            if "micro_batch_after" in event:
                text += f": {event['micro_batch_before']} → {event['micro_batch_after']} samples at once"
            if event.get("remedy"):
                text += f": {event['remedy']}"
            if event.get("shapes"):
                text += f"; the batch: {_list_shapes(event['shapes'])}"
            if event.get("dataset_indices"):
                text += f", samples {_list_indices(event['dataset_indices'])}"
            return f"{text} ({event['message'][:200]})"
        case "worst_batch_fits":
            text = f"before {where}: the largest batch fits, {event['samples_at_once']} samples at once"
            return f"{text}: {_list_shapes(event['shapes'])}, samples {_list_indices(event.get('dataset_indices'))}"
        case "micro_batch_lowered":
            share, before, after = event["utilization"], event["micro_batch_before"], event["micro_batch_after"]
            return (
                f"{where}: memory {event['status']} at {share:.0%}: batch reduced from {before} to {after} samples at "
                "once"
            )
        case "micro_batch_restored":
            # Logs of version 0.1 have no samples_at_once.
            chunks = f"{event['samples_at_once']} samples" if "samples_at_once" in event else "more samples"
            return f"{where}: memory stayed low: batch restored to {chunks} at once"
        case "memory_grows":
            return f"{where}: memory grows: {event['label']}"
        case "effective_batch_kept":
            samples, processes = event["effective_batch_size"], event["world_size"]
            return (
                f"{where}: effective batch size kept at {samples}, on {processes} process(es): "
                f"gradient_accumulation_steps={event['gradient_accumulation_steps']}"
            )
    details = _listed({name: value for name, value in event.items() if name not in ("event", "step", "process")})
    return f"{where}: {event['event'].replace('_', ' ')}: {details}"


def _list_indices(indices: list[int] | None) -> str:
    """The first eight indices; the event holds all."""
    if indices is None:
        return "unknown"
    return ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")


def _list_shapes(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in list(shapes.items())[:3])


def _end(report: dict[str, Any]) -> str:
    held = ", ".join(f"{name.replace('_', ' ')} {size(held)}" for name, held in report["held_bytes"].items())
    lines = [
        f"out of memory in {report['stage']} of step {report['step'] + 1}, and {report['why_not_smaller']}: "
        f"{report['cause']} ({report['message'][:300]})",
        *([f"  likely cause: {report['reason']}"] if report.get("reason") else []),
        f"  the batch: {_list_shapes(report['shapes'])}, samples {_list_indices(report.get('dataset_indices'))}",
        f"  held: {held}",
    ]
    if report.get("predicted_breakdown"):
        parts = report["predicted_breakdown"].items()
        predicted = ", ".join(f"{kind.replace('_', ' ')} {size(part)}" for kind, part in parts if part)
        lines.append(f"  predicted for one sample: {predicted}")
    for change in report["next"]:
        saved = f", predicted to save {size(change['saved_bytes'])}" if change.get("saved_bytes") else ""
        lines.append(f"  try: {change['change']}{saved}")
    if report.get("checkpoint"):
        lines.append(f"  saved: {report['checkpoint']}; the same command resumes from there")
    return "\n".join(lines)
