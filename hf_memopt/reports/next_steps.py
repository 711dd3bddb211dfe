"""Next steps to try, from the files of a finished run."""

from statistics import median
from typing import Any

from hf_memopt.monitor.growth import ADVICE
from hf_memopt.reports.run import Run
from hf_memopt.reports.slow import HALF_EMPTY, larger_batch, used_share, why_slow
from hf_memopt.units import size


def suggest_next_steps(run: Run) -> list[str]:
    """Sentences, the most urgent first; at least one."""
    report, events = run.report, run.events
    settings = report.get("settings", {})
    kinds = {event.get("event") for event in events}
    steps = []
    for event in events:
        if event.get("event") == "out_of_memory":
            for change in event.get("next") or ():
                saved = f": predicted to save {size(change['saved_bytes'])}" if change.get("saved_bytes") else ""
                steps.append(f"{change.get('change')}{saved}.")
            if event.get("checkpoint"):
                steps.append(f"The last good step was saved: the same command resumes from {event['checkpoint']}.")
    if smallest := _smallest_chunk(events):
        steps.append(
            f"Micro-batches ran in chunks of down to {smallest} samples. per_device_train_batch_size={smallest} with "
            "more gradient_accumulation_steps trains the same without running out of memory first."
        )
    for label in {event.get("label", "") for event in events if event.get("event") == "memory_grows"}:
        steps.append(f"Memory grew ({label}): {ADVICE.get(label, '')}.")
    if "oom_recovered" in kinds and "worst_batch_fits" not in kinds:
        steps.append("probe_worst_batch=true tries the largest batch before the first step.")
    share, fragments = used_share(run), _reserved_overhead(report)
    if fragments > 0.2:
        steps.append(
            f"The allocator reserved {fragments:.0%} more than tensors needed: set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    if share is not None and share > 0.92 and not steps:
        steps.append(
            f"The device was {share:.0%} full: a longer sample may not fit. probe_worst_batch=true tries the "
            "largest batch first."
        )
    if slow := why_slow(run):
        steps.append(f"{slow.why[0].upper()}{slow.why[1:]}. What helps: {'; '.join(slow.changes)}.")
    if share is not None and share < HALF_EMPTY and not steps:
        checkpointed = settings.get("activation_checkpointing")
        batch, accumulation = settings.get("per_device_train_batch_size"), settings.get("gradient_accumulation_steps")
        larger = "Checkpoint fewer layers (checkpoint_ratio below 1), then set" if checkpointed else "Set"
        steps.append(
            f"Only {share:.0%} of the device was used. {larger} {larger_batch(batch, accumulation)}; "
            "hf-memopt plan MODEL finds the fastest that fits."
        )
    return steps or ["Nothing: the run fitted and used its memory well."]


def _smallest_chunk(events) -> int | None:
    sizes = [
        event["micro_batch_after"]
        for event in events
        if event.get("micro_batch_after") and event.get("stage", "forward") in ("forward", "backward")
    ]
    return min(sizes, default=None)


def _reserved_overhead(report: dict[str, Any]) -> float:
    measured = report.get("measured", {})
    reserved, allocated = measured.get("peak_reserved_bytes"), measured.get("peak_allocated_bytes")
    return reserved / allocated - 1 if reserved and allocated and reserved > 2**30 else 0.0


def speed(run: Run) -> tuple[float, float, float, int] | None:
    """Tokens a second: median, lowest, highest, number of readings; without the first, which includes start-up."""
    speeds = [reading["tokens_per_second"] for reading in run.readings if reading.get("tokens_per_second")][1:]
    return (median(speeds), min(speeds), max(speeds), len(speeds)) if speeds else None
