"""When weights, optimizer states and the step's number belong together: another thread may save them only then."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import TrainerCallback

_LONGEST = 600.0  # seconds that an optimizer may take; an update that raised never ends


class Updates(TrainerCallback):
    """Holds a lock from before the optimizer's step until the step is counted."""

    def __init__(self, trainer) -> None:
        self._trainer = trainer
        self._lock: threading.Lock | None = None  # only while training: a trainer with one cannot be pickled

    def on_train_begin(self, args, state, control, **kwargs):
        self._lock = threading.Lock()  # an earlier training may have ended in the middle of an update

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
        """Whether an update has begun that has not ended."""
        return self._lock is not None and self._lock.locked()

    @contextmanager
    def kept_out(self) -> Iterator[bool]:
        """No update begins while it lasts, and none is running; False where one did not end."""
        lock = self._lock
        free = lock is None or lock.acquire(timeout=_LONGEST)
        try:
            yield free
        finally:
            if free and lock is not None:
                lock.release()
