"""What data loading takes of the host: worker processes, batches that wait in them, a stream's shuffle buffers."""

from dataclasses import dataclass

import psutil

from hf_memopt.units import gib

TOKEN_BYTES = 24  # input_ids, labels and attention_mask or position_ids, 8 bytes each
# Bytes of text for a token: about four characters of English (OpenAI, "What are tokens and how to count them?"). Other
# languages and code take more or fewer; a stream's rows have not been seen when this is needed.
_TEXT_BYTES = 4


@dataclass(frozen=True)
class LoaderMemory:
    """Host memory of a job's data loading, in bytes.

    Attributes:
        workers: of one process that trains.
        processes: that train on this machine, each with its workers.
        prefetch: batches that wait for each worker.
        batch: of one micro-batch.
        worker: what one process has of its own (measure_worker); None where it is not known.
        buffer: rows that each worker shuffles within; 0 where the data are not a stream.
        free: of the host, now.
    """

    workers: int
    processes: int
    prefetch: int
    batch: int
    worker: int | None
    buffer: int
    free: int

    @property
    def batches(self) -> int:
        """Of all batches that wait."""
        return self.processes * self.workers * self.prefetch * self.batch

    @property
    def total(self) -> int:
        """Of everything."""
        return self.batches + self.processes * (self.workers * (self.worker or 0) + max(1, self.workers) * self.buffer)

    @property
    def warning(self) -> str | None:
        """What to change where it is more than the host has left; None where it is not."""
        if self.total <= self.free:
            return None
        each = self.processes * ((self.worker or 0) + self.prefetch * self.batch + self.buffer)
        changes = [f"dataloader_num_workers={self.free // max(1, each)}"] if self.workers else []
        if self.buffer > (self.worker or 0):
            changes.append("a smaller shuffle_buffer_size")
        needs = f"data loading takes about {gib(self.total)} of host memory, and {gib(self.free)} are free"
        return f"{needs}: set {', or '.join(changes)}"

    def __str__(self) -> str:
        many = f"{self.processes} × " if self.processes > 1 else ""
        own = (
            "not measured: none could be started"
            if self.worker is None
            else f"{mib(self.worker)} each when they start"
        )
        parts = [
            f"{many}{self.workers} worker(s), {own}",
            f"{self.prefetch} batch(es) ahead in each: {mib(self.batches)}",
        ]
        if self.buffer:
            parts.append(f"shuffle buffers of about {mib(self.buffer)} each")
        return f"{', '.join(parts)}; {gib(self.free)} of host memory free"


def mib(size: int) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:,.1f} MiB"


def loader_memory(
    fields, batch: int, processes: int = 1, buffer_rows: int = 0, tokens: int = 0
) -> LoaderMemory | None:
    """What data loading would take here; None without workers and without a stream's buffer.

    Args:
        fields: TrainingArguments fields, by name.
        batch: bytes of one micro-batch.
        processes: that train on this machine.
        buffer_rows: rows that a stream is shuffled within.
        tokens: of such a row, at most.
    """
    workers = fields.get("dataloader_num_workers") or 0
    if not workers and not buffer_rows:
        return None
    context = fields.get("dataloader_multiprocessing_context")
    return LoaderMemory(
        workers=workers,
        processes=processes,
        prefetch=fields.get("dataloader_prefetch_factor") or 2,  # torch's default
        batch=batch,
        worker=measure_worker(context) if workers else 0,
        buffer=buffer_rows * tokens * _TEXT_BYTES,
        free=psutil.virtual_memory().available,
    )


def measure_worker(context: str | None = None) -> int | None:
    """Bytes that a data loading worker has for itself when it starts, of a real one; None where none started.

    A forked worker shares what this process has read in, until one of the two writes to it, so that it grows while it
    works; a spawned one imports torch again.

    Args:
        context: fork, spawn or forkserver; by default the system's.
    """
    import torch
    from torch.utils.data import DataLoader

    # A generator of its own: the loader draws a seed, and training's random numbers are to stay as they are.
    loader = DataLoader(
        _OwnMemory(),
        num_workers=1,
        batch_size=None,
        multiprocessing_context=context,
        timeout=120,
        generator=torch.Generator(),
    )
    try:
        return int(next(iter(loader))) or None
    except (RuntimeError, OSError):  # none could be started, or it died; training's own workers will say why
        return None


class _OwnMemory:
    """A data set of one sample: the memory that no other process shares with the one that reads it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        try:
            return psutil.Process().memory_full_info().uss
        except (psutil.Error, OSError, AttributeError):  # kernels without /proc/PID/smaps have no such figure
            return 0
