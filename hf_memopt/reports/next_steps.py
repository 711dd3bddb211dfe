"""What a finished run's files show: next steps to try, and what makes a run slow that fits.

A run is slow where it waits for data or for the disk, or where its device is idle.
"""

from dataclasses import dataclass
from statistics import median

from hf_memopt.monitor.growth import ADVICE
from hf_memopt.reports.run import Run
from hf_memopt.units import size

# Shares above which a change is noticeable. Judgement, not measured: without a wait of 0.1 a step takes a tenth less.
_DATA_WAIT = 0.1  # of step time
_DISK_WAIT = 0.1  # of the processors' time
_BUSY = 0.7  # of the time that the device computes
HALF_EMPTY = 0.6  # of the device's memory: below it, about twice the samples fit


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
    sizes = [
        event["micro_batch_after"]
        for event in events
        if event.get("micro_batch_after") and event.get("stage", "forward") in ("forward", "backward")
    ]
    if smallest := min(sizes, default=None):
        steps.append(
            f"Micro-batches ran in chunks of down to {smallest} samples. per_device_train_batch_size={smallest} with "
            "more gradient_accumulation_steps trains the same without running out of memory first."
        )
    for label in {event.get("label", "") for event in events if event.get("event") == "memory_grows"}:
        steps.append(f"Memory grew ({label}): {ADVICE.get(label, '')}.")
    if "oom_recovered" in kinds and "worst_batch_fits" not in kinds:
        steps.append("probe_worst_batch=true tries the largest batch before the first step.")
    measured = report.get("measured", {})
    reserved, allocated = measured.get("peak_reserved_bytes"), measured.get("peak_allocated_bytes")
    share = used_share(run)
    fragments = reserved / allocated - 1 if reserved and allocated and reserved > 2**30 else 0.0
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


def speed(run: Run) -> tuple[float, float, float, int] | None:
    """Tokens a second: median, lowest, highest, number of readings; without the first, which includes start-up."""
    speeds = [reading["tokens_per_second"] for reading in run.readings if reading.get("tokens_per_second")][1:]
    return (median(speeds), min(speeds), max(speeds), len(speeds)) if speeds else None


@dataclass(frozen=True)
class Slow:
    """Attributes:
    cause: data, disk or device.
    why: a sentence with the measured figures.
    changes: settings to change, the most effective first.
    """

    cause: str
    why: str
    changes: list[str]


def why_slow(run: Run) -> Slow | None:
    """The bottleneck of a run; None where there is none, or the log does not show it (written by an older version)."""
    waited = data_wait_share(run)
    busy, disk = _median(run, "device_busy_share"), _median(run, "disk_wait_share")
    if waited is not None and waited >= _DATA_WAIT:
        workers = _logged(run, "dataloader_num_workers")
        why = f"the steps waited for data {waited:.0%} of their time"
        if disk is not None and disk >= _DISK_WAIT and workers:
            why += f" with {workers} workers, and the processors waited for the disk {disk:.0%} of theirs"
            return Slow("disk", why, _DISK_CHANGES)
        return Slow("data", f"{why}, with dataloader_num_workers={workers}", _data_changes(run, workers))
    if busy is not None and busy < _BUSY:
        return Slow(
            "device", f"the device was busy {busy:.0%} of the time, without waiting for data", _device_changes(run)
        )
    return None


def data_wait_share(run: Run) -> float | None:
    """Share of step time that the run waited for data: its own count, else the log's median."""
    return run.report.get("data_wait_share", _median(run, "data_wait_share"))


_DISK_CHANGES = [
    "copy the data to a local disk (NVMe), or keep them in host memory (datasets: keep_in_memory=True)",
    "tokenize (and pack) once, before training: tokens are a fraction of the files they come from",
    "fewer dataloader_num_workers on a hard disk or network folder, where parallel reads slow each other down",
]


def _data_changes(run: Run, workers: int) -> list[str]:
    settings = run.report.get("settings", {})
    larger = min(2 * workers or 4, _logged(run, "processors") or 4096)
    more = (
        f"dataloader_num_workers={larger}: batches are made while a step runs, not before it (your own "
        "IterableDataset must divide its rows among them)"
    )
    ahead = 2 * (_count(settings.get("dataloader_prefetch_factor")) or 2)
    persistent = settings.get("dataloader_persistent_workers")
    changes = (
        (more, larger > workers),
        (f"dataloader_prefetch_factor={ahead}, where some samples take much longer than others", workers),
        ("tokenize and pack before training, not in __getitem__ or the collator", True),
        ("dataloader_persistent_workers=true: the workers stay from epoch to epoch", not persistent),
    )
    return [change for change, helps in changes if helps]


def _device_changes(run: Run) -> list[str]:
    settings = run.report.get("settings", {})
    batch, steps = settings.get("per_device_train_batch_size"), settings.get("gradient_accumulation_steps")
    share = used_share(run)
    changes = []
    if share is not None and share < HALF_EMPTY:
        changes.append(f"{larger_batch(batch, steps)}: {share:.0%} of the device's memory was used")
    if settings.get("activation_checkpointing") and changes:
        changes.append("checkpoint_ratio below 1: fewer checkpointed layers")
    if not settings.get("torch_compile"):
        changes.append("torch_compile=true: fewer, larger kernels, so the device waits less for Python")
    return [*changes, "evaluate, save and log less often (eval_steps, save_steps, logging_steps)"]


def larger_batch(batch: int | None, steps: int | None) -> str:
    """The settings for twice the micro-batch at the same effective batch size."""
    if isinstance(batch, int) and isinstance(steps, int) and steps > 1 and steps % 2 == 0:
        return f"per_device_train_batch_size={2 * batch} with gradient_accumulation_steps={steps // 2}"
    return "a larger per_device_train_batch_size with fewer gradient_accumulation_steps"


def used_share(run: Run) -> float | None:
    """Share of the device that the run took at most: of its allocator, or of the host."""
    measured, capacity = run.report.get("measured", {}), run.report.get("hardware", {}).get("memory_bytes")
    peak = measured.get("peak_reserved_bytes") or measured.get("peak_host_bytes")
    if peak and capacity:
        return peak / capacity
    if run.readings and run.readings[-1].get("capacity"):  # of a plain Trainer
        return max(reading["peak_allocated"] for reading in run.readings) / run.readings[-1]["capacity"]
    return None


def _median(run: Run, name: str) -> float | None:
    """The median of a logged share, without the first reading, which includes start-up."""
    shares = [reading[name] for reading in run.readings if name in reading][1:]
    return median(shares) if shares else None


def _logged(run: Run, name: str) -> int:
    """A number from the last reading that has it, else from the run's settings; 0 where neither has it."""
    logged = [reading[name] for reading in run.readings if name in reading]
    return logged[-1] if logged else _count(run.report.get("settings", {}).get(name))


def _count(value: object) -> int:
    """A setting as a count; 0 where the file holds anything else."""
    return value if isinstance(value, int) and value > 0 else 0
