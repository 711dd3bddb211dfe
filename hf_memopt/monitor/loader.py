"""Host memory of data loading: worker processes, prefetched batches, shuffle buffers of streams."""

from dataclasses import dataclass

import psutil

from hf_memopt.units import gib, size

TOKEN_BYTES = 24  # input_ids, labels and attention_mask or position_ids, 8 bytes each
# Bytes of text per token: about four characters of English (OpenAI, "What are tokens and how to count them?"). Other
# languages and code differ, but a stream's rows cannot be counted before it is read.
_TEXT_BYTES = 4


@dataclass(frozen=True)
class LoaderMemory:
    """Host memory of a job's data loading, in bytes.

    Attributes:
        workers: number per training process.
        processes: training processes on this machine, each with its workers.
        prefetch: batches prefetched by each worker.
        batch: bytes of one micro-batch.
        worker: bytes of one worker process (measure_worker); None where unknown.
        buffer: bytes of each worker's shuffle buffer; 0 where the dataset is not a stream.
        free: bytes available on the host now.
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
        """Bytes of all prefetched batches."""
        return self.processes * self.workers * self.prefetch * self.batch

    @property
    def total(self) -> int:
        """Bytes of workers, batches and buffers together."""
        return self.batches + self.processes * (self.workers * (self.worker or 0) + max(1, self.workers) * self.buffer)

    @property
    def warning(self) -> str | None:
        """The advice where the host has too little memory; None where it has enough."""
        if self.total <= self.free:
            return None
        per_worker = self.processes * ((self.worker or 0) + self.prefetch * self.batch + self.buffer)
        changes = [f"dataloader_num_workers={self.free // max(1, per_worker)}"] if self.workers else []
        if self.buffer > (self.worker or 0):
            changes.append("a smaller shuffle_buffer_size")
        needs = f"data loading takes about {gib(self.total)} of host memory, and {gib(self.free)} are free"
        return f"{needs}: set {', or '.join(changes)}"

    def __str__(self) -> str:
        many = f"{self.processes} × " if self.processes > 1 else ""
        own = "not measured: none could be started" if self.worker is None else f"{size(self.worker)} each at start"
        parts = [
            f"{many}{self.workers} worker(s), {own}",
            f"{self.prefetch} prefetched batch(es) each: {size(self.batches)}",
        ]
        if self.buffer:
            parts.append(f"shuffle buffers of about {size(self.buffer)} each")
        return f"{', '.join(parts)}; {gib(self.free)} of host memory free"


def loader_memory(
    fields, batch: int, processes: int = 1, buffer_rows: int = 0, tokens: int = 0
) -> LoaderMemory | None:
    """The memory that data loading would take here; None without workers and shuffle buffers.

    Args:
        fields: TrainingArguments fields, by name.
        batch: bytes of one micro-batch.
        processes: training processes on this machine.
        buffer_rows: rows in a stream's shuffle buffer.
        tokens: most tokens in such a row.
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
    """Private bytes of a data loading worker that is really started; None where it cannot be.

    A forked worker shares this process's pages until one of the two writes to them, so it grows later; a spawned one
    imports torch again.

    Args:
        context: fork, spawn or forkserver; by default Python's.
    """
    import torch
    from torch.utils.data import DataLoader

    # A generator of its own: the loader draws a seed, which must not change training's random numbers.
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
    except (RuntimeError, OSError):  # it did not start, or died; training's own workers will report why
        return None


class _OwnMemory:
    """A dataset of one sample: the private memory (USS) of the process that reads it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        try:
            return psutil.Process().memory_full_info().uss
        except (psutil.Error, OSError, AttributeError):  # kernels without /proc/PID/smaps do not count it
            return 0
