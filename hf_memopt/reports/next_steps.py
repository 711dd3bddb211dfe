"""What to try next, from what a run left."""

from statistics import median
from typing import Any

from hf_memopt.monitor.growth import ADVICE
from hf_memopt.reports.run import Run
from hf_memopt.reports.slow import ROOM, filled, larger_batch, why_slow
from hf_memopt.units import gib


def suggest_next_steps(run: Run) -> list[str]:
    """Sentences, the most urgent first; at least one."""
    report, events = run.report, run.events
    settings = report.get("settings", {})
    kinds = {event.get("event") for event in events}
    told = []
    for event in events:
        if event.get("event") == "out_of_memory":
            told += [_change(one) for one in event.get("next") or ()]
            if event.get("checkpoint"):
                told.append(f"The last good step was saved: starting again goes on from {event['checkpoint']}.")
    if smallest := _smallest_piece(events):
        told.append(
            f"Micro-batches ran in pieces of down to {smallest} samples. "
            f"per_device_train_batch_size={smallest} "
            "with more gradient_accumulation_steps trains the same at once, without failing."
        )
    for label in {event.get("label", "") for event in events if event.get("event") == "memory_grows"}:
        told.append(f"Memory grew ({label}): {ADVICE.get(label, '')}.")
    if "oom_recovered" in kinds and "worst_batch_fits" not in kinds:
        told.append("probe_worst_batch=true tries the largest batch before the first step.")
    share, fragments = filled(run), _unused(report)
    if fragments > 0.2:
        told.append(
            f"The allocator took {fragments:.0%} more than tensors needed: set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    if share is not None and share > 0.92 and not told:
        told.append(
            f"The device was {share:.0%} full: a longer sample may not fit. probe_worst_batch=true tries the "
            "largest batch first, loss_chunk_size=1024 takes the logits out of the peak."
        )
    slow = why_slow(run)
    if slow:
        told.append(f"{slow.why[0].upper()}{slow.why[1:]}. What helps: {'; '.join(slow.changes)}.")
    if share is not None and share < ROOM and not told:
        larger = "Recompute fewer layers (checkpoint_ratio below 1), then take" if _recomputes(settings) else "Take"
        told.append(
            f"Only {share:.0%} of the device was used. {larger} {larger_batch(*_batch(settings))}; "
            "hf-memopt plan MODEL finds the fastest that fits."
        )
    return told or ["Nothing: memory sufficed, and was used well."]


def _change(one: dict[str, Any]) -> str:
    saved = one.get("saved_bytes")
    return f"{one.get('change')}" + (f": predicted to save {gib(saved)}." if saved else ".")


def _smallest_piece(events) -> int | None:
    cut = [
        event["micro_batch_after"]
        for event in events
        if event.get("micro_batch_after") and event.get("stage", "forward") in ("forward", "backward")
    ]
    return min(cut, default=None)


def _batch(settings: dict[str, Any]) -> tuple[Any, Any]:
    return settings.get("per_device_train_batch_size"), settings.get("gradient_accumulation_steps")


def _unused(report: dict[str, Any]) -> float:
    measured = report.get("measured", {})
    reserved, allocated = measured.get("peak_reserved_bytes"), measured.get("peak_allocated_bytes")
    return reserved / allocated - 1 if reserved and allocated and reserved > 2**30 else 0.0


def _recomputes(settings: dict[str, Any]) -> bool:
    return bool(settings.get("activation_checkpointing"))


def speed(run: Run) -> tuple[float, float, float, int] | None:
    """Tokens a second: median, lowest, highest, readings; the first, which has the start in it, is left out."""
    found = [one["tokens_per_second"] for one in run.readings if one.get("tokens_per_second")][1:]
    return (median(found), min(found), max(found), len(found)) if found else None
