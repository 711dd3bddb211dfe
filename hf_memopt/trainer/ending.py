"""Ending a run that cannot continue for lack of memory: save, write oom_report.json, raise."""

import logging
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from transformers import TrainerCallback

from hf_memopt.errors import TrainingOutOfMemory
from hf_memopt.files import write_json
from hf_memopt.monitor.snapshot_callback import SnapshotCallback
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose
from hf_memopt.oom.events import describe_event
from hf_memopt.trainer.distributed import Peers
from hf_memopt.trainer.oom_report import describe_failure
from hf_memopt.trainer.step.recoverability import changes_weights_in_backward, holds_whole_model

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

logger = logging.getLogger(__name__)

_CONNECTION_LOST = (ConnectionError, EOFError, FileNotFoundError)
_SIGNAL_WITHIN = 1.0  # seconds for the system to deliver SIGCHLD
_LONGEST_UPDATE = 600.0  # seconds that an optimizer step may take; an update that raised never releases the lock


def worker_death(error: Exception) -> Exception:
    """The error that names a killed data loading worker, where `error` is a connection lost to one; else `error`.

    A worker killed while it hands over a batch first shows as a lost connection. torch's handler of SIGCHLD raises the
    error that names the cause a moment later. The private function is what that handler calls (torch 2.13,
    torch.utils.data._utils.signal_handling); without it such a run ends with the lost connection's traceback.
    """
    from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

    if not isinstance(error, _CONNECTION_LOST):
        return error
    end = time.monotonic() + _SIGNAL_WITHIN
    try:
        while time.monotonic() < end:
            _error_if_any_worker_fails()
            time.sleep(0.01)
    except RuntimeError as death:  # by the call, or by the handler within the loop
        return death
    return error


class Updates(TrainerCallback):
    """Holds a lock from before the optimizer step until global_step is incremented.

    In between, weights, optimizer states and step number are inconsistent, and another thread must not save them.
    """

    def __init__(self, trainer: "MemoryTrainer") -> None:
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
        free = lock is None or lock.acquire(timeout=_LONGEST_UPDATE)
        try:
            yield free
        finally:
            if free and lock is not None:
                lock.release()


class Ending:
    """Ends a trainer's run so that another can resume from the last good step."""

    def __init__(self, trainer: "MemoryTrainer", peers: Peers) -> None:
        self._trainer = trainer
        self._peers = peers
        self.updates = Updates(trainer)

    def end_run(self, stage: str, diagnosis: Diagnosis, micro=None, why: str = "", intact: bool = True) -> NoReturn:
        """Save the last good step, write oom_report.json and raise.

        Other processes are notified first and wait until the checkpoint is saved, not for the report.

        Args:
            stage: data, forward, backward, clipping, optimizer, eval, save or callbacks.
            micro: the MicroBatch that failed; None where none was running.
            why: why no smaller batch helps; by default that it is one sample.
            intact: weights and optimizer states are those of the last good step.

        Raises:
            TrainingOutOfMemory: always.
        """
        trainer = self._trainer
        if stage in ("clipping", "optimizer"):
            # Other processes may have finished this step already; neither stage draws random numbers.
            trainer._runner.remember_state(ahead=1)
        self._peers.announce(diagnosis.message, trainer.limit.elements)
        if trainer.optimizer is not None and trainer._runner.recovers:
            trainer.optimizer.zero_grad()
        checkpoint = self._peers.share_checkpoint(self._checkpoint(intact))
        self.write_snapshot()
        report = describe_failure(trainer, stage, diagnosis, micro, why) | {"checkpoint": checkpoint}
        logger.error("%s", describe_event(report))
        path = Path(trainer.args.output_dir) / "oom_report.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, report)
        except OSError as error:  # the error above says what happened; a full disk must not replace it
            logger.error("%s cannot be written: %s", path, error.strerror)
        raise TrainingOutOfMemory(describe_event(report), report)

    def can_explain(self, error: Exception) -> bool:
        """True if an error that ends training is about memory and has no report yet."""
        if isinstance(error, TrainingOutOfMemory) or not self._trainer.memory_args.oom_recovery:
            return False
        return diagnose(error).kind is not OomKind.NOT_MEMORY

    def explain(self, error: Exception) -> Diagnosis:
        """The diagnosis of an error that can_explain(), whose frames let go of their tensors; others are raised."""
        if not self.can_explain(error):
            raise error
        traceback.clear_frames(error.__traceback__)
        return diagnose(error)

    def end_run_outside_step(self, diagnosis: Diagnosis, stage: str = "") -> NoReturn:
        """End a run whose memory ran out while batches were made, or in a callback, where smaller chunks do not help.

        Args:
            stage: "data" or "callbacks"; by default read from the message, since torch raises the death of a data
                loading worker wherever its handler of SIGCHLD interrupts.

        Raises:
            TrainingOutOfMemory: always.
        """
        stage = stage or ("data" if "DataLoader worker" in diagnosis.message else "callbacks")
        where = "data loading" if stage == "data" else "code between the steps"
        updating = self.updates.running or changes_weights_in_backward(self._trainer)
        intact = holds_whole_model(self._trainer) and not updating
        self.end_run(stage, diagnosis, why=f"no smaller micro-batch helps {where}", intact=intact)

    def save_for_peer(self, elements: int | None) -> None:
        """Save this process's part of the last good step when another process has run out of memory.

        Under NCCL this device's stream waits behind an all-reduce that never completes, and copies of weights would
        wait behind it too: there the first process saves nothing for others, and the newest checkpoint stays the last.
        """
        trainer = self._trainer
        trainer.limit.adopt(elements)
        intact = holds_whole_model(trainer) and not changes_weights_in_backward(trainer)
        blocked = trainer.args.should_save and not self._peers.wait_on_host
        with self.updates.paused() as between_updates:
            checkpoint = self._checkpoint(intact and between_updates and not blocked)
        self._peers.share_checkpoint(checkpoint)

    def _checkpoint(self, intact: bool) -> str | None:
        """The folder to resume from: this step's, where it can be saved now, else the newest that this run wrote."""
        trainer = self._trainer
        # Other processes than the first save only their random states. An interrupted update does not change these,
        # and the first process needs them where it is one step ahead.
        can_save = intact and trainer.state.global_step > 0 if trainer.args.should_save else holds_whole_model(trainer)
        state = trainer._runner.resume_state
        # A user's own loss may have changed weights before it failed.
        unchanged = state is not None and state.written == trainer._runner.buffers.written()
        if can_save and trainer.is_in_train and unchanged:
            return trainer.emergency_checkpoint() or trainer.newest_checkpoint()
        return trainer.newest_checkpoint()

    def write_snapshot(self) -> None:
        """Write the recorded allocations, where snapshot_on_oom or snapshot_steps is set."""
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, SnapshotCallback):
                callback.out_of_memory()
