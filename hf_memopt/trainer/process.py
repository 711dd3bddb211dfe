"""What train() changes in the process that it runs in, for as long as it runs."""

import contextlib
import logging
from collections.abc import Iterator

from hf_memopt.levers.compile_memory_budget import memory_budget
from hf_memopt.monitor.readers import process_limited
from hf_memopt.monitor.snapshot_callback import SnapshotCallback

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def settings_of_run(trainer) -> Iterator[None]:
    """Set the allocator's limit and the compiler's memory budget, and put both back at the end, however it comes.

    A snapshot that is being recorded ends too: on_train_end, which ends it usually, is not called after an error.
    """
    memory, device = trainer.memory_args, trainer.args.device
    budget = memory.compile_memory_budget if trainer.args.torch_compile else None
    try:
        with process_limited(device, memory.max_memory_gib) as limited, memory_budget(budget):
            if memory.max_memory_gib is not None and not limited:
                logger.warning(
                    "max_memory_gib=%s: a CPU's allocator cannot be limited; thresholds follow it",
                    memory.max_memory_gib,
                )
            yield
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, SnapshotCallback):
                callback.stop()
