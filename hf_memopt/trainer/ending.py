"""The end of a run that memory cannot hold: saved first, then explained, then raised."""

import logging
import time
from pathlib import Path
from typing import NoReturn

from hf_memopt.errors import TrainingOutOfMemory
from hf_memopt.files import write_json
from hf_memopt.monitor.snapshot_callback import SnapshotCallback
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose
from hf_memopt.oom.events import describe_event
from hf_memopt.trainer.distributed import Peers
from hf_memopt.trainer.oom_report import describe_failure
from hf_memopt.trainer.recoverability import changes_weights_in_backward, holds_whole_model
from hf_memopt.trainer.split import tensor_shapes
from hf_memopt.trainer.updates import Updates

logger = logging.getLogger(__name__)

_CONNECTION_LOST = (ConnectionError, EOFError, FileNotFoundError)
_SIGNAL_WITHIN = 1.0  # seconds


def worker_death(error: Exception) -> Exception:
    """The error that names a data loading worker which was killed while it handed a batch over; otherwise `error`.

    A lost connection to it may come before SIGCHLD, whose handler raises the one that says so (torch 2.13,
    torch.utils.data._utils.signal_handling).
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


class Ending:
    """Ends a trainer's run so that another one resumes from the last good step."""

    def __init__(self, trainer, peers: Peers) -> None:
        self._trainer = trainer
        self._peers = peers
        self.updates = Updates(trainer)

    def exhausted(self, stage: str, found: Diagnosis, micro=None, why: str = "", intact: bool = True) -> NoReturn:
        """Save the last good step, write oom_report.json and raise. The other processes wait for the former only.

        Args:
            stage: data, forward, backward, clipping, optimizer, eval, save or callbacks.
            micro: the micro-batch that failed; None where none was running.
            why: no smaller batch helps; by default it is one sample.
            intact: weights and optimizer states are those of the last good step.

        Raises:
            TrainingOutOfMemory: always.
        """
        trainer = self._trainer
        if stage in ("clipping", "optimizer"):  # others may have done this step, and these draw no random numbers
            trainer._runner.remember_state(ahead=1)
        self._peers.announce(found.message, trainer.limit.elements)
        if trainer.optimizer is not None and trainer._runner.recovers:
            trainer.optimizer.zero_grad()
        checkpoint = self._peers.saved(self._checkpoint(intact))
        self.snapshot()
        inputs = micro.inputs if micro is not None else {}
        indices = trainer._dataset_indices(micro) if micro is not None else None
        report = describe_failure(trainer, stage, found, tensor_shapes(inputs), indices, why) | {
            "checkpoint": checkpoint
        }
        self._write(report)
        raise TrainingOutOfMemory(describe_event(report), report)

    def explains(self, error: Exception) -> bool:
        """Whether an error that ends training is about memory, and has not been explained yet."""
        if isinstance(error, TrainingOutOfMemory) or not self._trainer.memory_args.oom_recovery:
            return False
        return diagnose(error).kind is not OomKind.NOT_MEMORY

    def elsewhere(self, found: Diagnosis, stage: str = "") -> NoReturn:
        """Memory ran out where no smaller micro-batch helps: in what makes the batches, or in a callback.

        A data loading worker that the system kills shows anywhere: torch raises in its handler of SIGCHLD.

        Args:
            stage: by default what the failure itself says.

        Raises:
            TrainingOutOfMemory: always.
        """
        stage = stage or ("data" if "DataLoader worker" in found.message else "callbacks")
        what = "what makes the batches" if stage == "data" else "what runs between the steps"
        updating = self.updates.running or changes_weights_in_backward(self._trainer)
        intact = holds_whole_model(self._trainer) and not updating
        self.exhausted(stage, found, why=f"no smaller micro-batch helps {what}", intact=intact)

    def save_for_peer(self, elements: int | None) -> None:
        """What a process does when another one cannot continue: its part of the last good step's checkpoint.

        Under NCCL, this device's stream waits behind a reduction that never completes, and so would copies of weights:
        there, the first process saves nothing for others, and the newest checkpoint stands.
        """
        trainer = self._trainer
        trainer.limit.agree(elements)
        intact = holds_whole_model(trainer) and not changes_weights_in_backward(trainer)
        blocked = trainer.args.should_save and not self._peers.wait_on_host
        with self.updates.kept_out() as between_updates:
            checkpoint = self._checkpoint(intact and between_updates and not blocked)
        self._peers.saved(checkpoint)

    def _checkpoint(self, intact: bool) -> str | None:
        """The folder to resume from: of this step where it can be saved now, else the newest that this run wrote."""
        trainer = self._trainer
        saves = trainer.args.should_save
        # Another process than the first saves its random states alone, which an update that broke off leaves as they
        # are, and which the first process needs where it has finished a step more.
        has_part = intact and trainer.state.global_step > 0 if saves else holds_whole_model(trainer)
        if has_part and trainer.is_in_train and trainer._runner.resume_state is not None:
            return trainer.emergency_checkpoint() or trainer.newest_checkpoint()
        return trainer.newest_checkpoint()

    def snapshot(self) -> None:
        """Write what was recorded of allocations, where that is switched on."""
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, SnapshotCallback):
                callback.out_of_memory()

    def _write(self, report: dict) -> None:
        logger.error("%s", describe_event(report))
        path = Path(self._trainer.args.output_dir) / "oom_report.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, report)
        except OSError as error:  # the end is explained above, and is not to be hidden behind a full disk
            logger.error("%s cannot be written: %s", path, error.strerror)
