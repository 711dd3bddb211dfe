"""Process-wide settings that train() changes while it runs."""

import contextlib
import logging
from collections.abc import Iterator

from hf_memopt.levers.compile_memory_budget import memory_budget
from hf_memopt.monitor.readers import process_limited
from hf_memopt.monitor.snapshot_callback import SnapshotCallback

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def settings_of_run(trainer) -> Iterator[None]:
    """A context with the allocator's limit and the compiler's memory budget of a trainer's MemoryArguments.

    On exit it also stops snapshots, since on_train_end is not called after an error.
    """
    memory, device = trainer.memory_args, trainer.args.device
    budget = memory.compile_memory_budget if trainer.args.torch_compile else None
    try:
        with process_limited(device, memory.max_memory_gib) as limited, memory_budget(budget):
            if memory.max_memory_gib is not None and not limited:
                logger.warning(
                    "max_memory_gib=%s: the CPU allocator has no limit; only the thresholds follow it",
                    memory.max_memory_gib,
                )
            yield
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, SnapshotCallback):
                callback.stop()
