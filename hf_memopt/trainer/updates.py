"""Tell when weights, optimizer states and step number are consistent, so that another thread may save them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import TrainerCallback

_LONGEST = 600.0  # seconds that an optimizer step may take; an update that raised never releases the lock


class Updates(TrainerCallback):
    """Holds a lock from before the optimizer step until global_step is incremented."""

    def __init__(self, trainer) -> None:
        self._trainer = trainer
        self._lock: threading.Lock | None = None  # only while training: Ray Tune pickles trainers

    def on_train_begin(self, args, state, control, **kwargs):
        self._lock = threading.Lock()  # a new one: an earlier train() may have ended in the middle of an update

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._lock.acquire()

    def on_step_end(self, args, state, control, **kwargs):
        self._trainer._runner.remember_state()
        if self.running:
            self._lock.release()

    def on_train_end(self, args, state, control, **kwargs):
        self._lock = None

    @property
    def running(self) -> bool:
        """True if an update has begun and not ended."""
        return self._lock is not None and self._lock.locked()

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """A context in which no update runs; yields False where the running one did not end."""
        lock = self._lock
        free = lock is None or lock.acquire(timeout=_LONGEST)
        try:
            yield free
        finally:
            if free and lock is not None:
                lock.release()
