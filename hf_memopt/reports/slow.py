"""Why a run that fits is slow: it waits for data, for the disk, or gives its device too little to do."""

from dataclasses import dataclass
from statistics import median

from hf_memopt.reports.run import Run

# Shares from which a change can be felt: a step without its wait would take a tenth less, …
_WAITS = 0.1
_DISK = 0.1  # of the processors' time, idle because of the disk
_IDLE = 0.7  # the device computes for less than this
ROOM = 0.6  # of the device's memory; a run that takes less could take about twice the samples


@dataclass(frozen=True)
class Slow:
    """Attributes:
    cause: data, disk or device.
    why: a sentence with the figures that were measured.
    changes: the most effective first, in Hugging Face's words.
    """

    cause: str
    why: str
    changes: list[str]


def why_slow(run: Run) -> Slow | None:
    """What holds a run up; None where nothing does, or the log does not say (it is of an older version)."""
    waited, busy, disk = data_wait_share(run), _usual(run, "device_busy_share"), _usual(run, "disk_wait_share")
    if waited is not None and waited >= _WAITS:
        workers = _logged(run, "dataloader_num_workers")
        why = f"the steps waited for data {waited:.0%} of their time"
        if disk is not None and disk >= _DISK and workers:
            why += f", with {workers} workers, and the host's processors for the disk {disk:.0%} of theirs"
            return Slow("disk", why, _DISK_CHANGES)
        return Slow("data", f"{why}, with dataloader_num_workers={workers}", _data_changes(run, workers))
    if busy is not None and busy < _IDLE:
        return Slow("device", f"the device computed {busy:.0%} of the time, and data were there", _device_changes(run))
    return None


def data_wait_share(run: Run) -> float | None:
    """Share of the steps' time that the run waited for data: what it counted itself, else the log's median."""
    return run.report.get("data_wait_share", _usual(run, "data_wait_share"))


_DISK_CHANGES = [
    "copy the data to a local disk (NVMe), or keep them in host memory (datasets: keep_in_memory=True)",
    "tokenize (and pack) once, before training: tokens are a fraction of the files they come from",
    "fewer dataloader_num_workers on a hard disk or network folder, whose readers hold each other up",
]


def _data_changes(run: Run, workers: int) -> list[str]:
    settings = run.report.get("settings", {})
    most = min(2 * workers or 4, _logged(run, "processors") or 4096)
    changes = []
    if most > workers:
        changes.append(
            f"dataloader_num_workers={most}: batches are made beside the step, not before it (an IterableDataset of "
            "your own must share its rows out among them)"
        )
    if workers:
        ahead = 2 * (_count(settings.get("dataloader_prefetch_factor")) or 2)
        changes.append(f"dataloader_prefetch_factor={ahead}, where some samples take much longer than others")
    changes.append("tokenize and pack before training, not in __getitem__ or the collator")
    if not settings.get("dataloader_persistent_workers"):
        changes.append("dataloader_persistent_workers=true: the workers stay from epoch to epoch")
    return changes


def _device_changes(run: Run) -> list[str]:
    settings = run.report.get("settings", {})
    batch, steps = settings.get("per_device_train_batch_size"), settings.get("gradient_accumulation_steps")
    share = filled(run)
    changes = []
    if share is not None and share < ROOM:
        changes.append(f"{larger_batch(batch, steps)}: {share:.0%} of the device's memory was used")
    if settings.get("activation_checkpointing") and changes:
        changes.append("checkpoint_ratio below 1: fewer layers are computed twice")
    if not settings.get("torch_compile"):
        changes.append("torch_compile=true: fewer, larger kernels, so that the device waits less for Python")
    return [*changes, "evaluate, save and log less often (eval_steps, save_steps, logging_steps)"]


def larger_batch(batch: int | None, steps: int | None) -> str:
    """Twice the samples at once and the same effective batch, in words."""
    if isinstance(batch, int) and isinstance(steps, int) and steps > 1 and steps % 2 == 0:
        return f"per_device_train_batch_size={2 * batch} with gradient_accumulation_steps={steps // 2}"
    return "a larger per_device_train_batch_size with fewer gradient_accumulation_steps"


def filled(run: Run) -> float | None:
    """Share of the device that the run took at most: of its allocator, or of the host."""
    measured, capacity = run.report.get("measured", {}), run.report.get("hardware", {}).get("memory_bytes")
    taken = measured.get("peak_reserved_bytes") or measured.get("peak_host_bytes")
    if taken and capacity:
        return taken / capacity
    if run.readings and run.readings[-1].get("capacity"):  # of a plain Trainer
        return max(one["peak_allocated"] for one in run.readings) / run.readings[-1]["capacity"]
    return None


def _usual(run: Run, name: str) -> float | None:
    """The median of a share over the log; the first reading, which has the start in it, is left out."""
    found = [one[name] for one in run.readings if name in one][1:]
    return median(found) if found else None


def _logged(run: Run, name: str) -> int:
    """A number of the log's last reading that has it, or of the run's settings; 0 where neither says."""
    logged = [one[name] for one in run.readings if name in one]
    return logged[-1] if logged else _count(run.report.get("settings", {}).get(name))


def _count(value: object) -> int:
    """A setting as a count; 0 where a report of somebody's says anything else."""
    return value if isinstance(value, int) and value > 0 else 0
