"""Ctrl-C and SIGTERM during training finish the step, write a checkpoint and stop the run.

All processes stop at the end of the same step. A second Ctrl-C stops at once.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from transformers import ProgressCallback, TrainerCallback

from hf_memopt.errors import Terminated, one_line

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

# Only default handlers are replaced. The user's own, that of enable_jit_checkpoint (with which transformers saves a
# checkpoint at SIGTERM itself) and ignored signals of background jobs stay.
_REPLACED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class _Stopped:
    """Fields of both exceptions.

    Attributes:
        step: the last finished step.
        checkpoint: the newest that the run wrote or resumed from, maybe older than `step`; None if there is none.
        message: one sentence with the step and the checkpoint.
    """

    def __init__(self, message: str, step: int, checkpoint: str | None) -> None:
        super().__init__(message)
        self.message, self.step, self.checkpoint = message, step, checkpoint

    def __str__(self) -> str:
        return self.message


class TrainingInterrupted(_Stopped, KeyboardInterrupt):
    """train() was stopped by Ctrl-C (SIGINT). A KeyboardInterrupt, so that code after train() does not run."""


class TrainingTerminated(_Stopped, Terminated):
    """train() was stopped by SIGTERM. Uncaught, it ends the process with exit code 143 and no traceback."""

    def __init__(self, message: str, step: int, checkpoint: str | None) -> None:
        super().__init__(message, step, checkpoint)
        self.code = 128 + signal.SIGTERM


@contextlib.contextmanager
def interruptible(trainer: "MemoryTrainer") -> Iterator["_StopAtStepEnd"]:
    """A context in which Ctrl-C and SIGTERM stop training at the end of a step.

    Handlers are installed only in the main thread (Python allows no other), and restored at the end.

    Yields:
        A callback whose attribute `signal` is the signal that came, or None.

    Raises:
        TrainingInterrupted, TrainingTerminated: at the end of the step, or at once after a second Ctrl-C.
    """
    stop = _StopAtStepEnd(trainer)
    trainer.add_callback(stop)
    try:
        with _handled(stop.request):
            yield stop
    except Exception as error:
        # A data loading worker that the same signal ended, or another process that has stopped already.
        if stop.signal is None:
            raise
        stop.save_last_step()
        raise stop.ending(f"{type(error).__name__}: {one_line(error)}"[:200]) from error
    except (TrainingInterrupted, TrainingTerminated):
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.close()  # so that the next output starts on a new line
        if stop.agreed and not trainer._peers.alone:
            trainer._peers.smallest(None)  # a barrier: the first process may host the store that the others still read
        raise
    finally:
        trainer.remove_callback(stop)


@contextlib.contextmanager
def _handled(handler) -> Iterator[None]:
    numbers = _REPLACED if threading.current_thread() is threading.main_thread() else {}
    replaced = [number for number, usual in numbers.items() if signal.getsignal(number) is usual]
    before = {number: signal.signal(number, handler) for number in replaced}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


class _StopAtStepEnd(TrainerCallback):
    """Notes a request, and stops when every process has finished the same step. Runs after all other callbacks.

    Attributes:
        signal: the first that came, here or in another process; None before.
        agreed: all processes stop after the last finished step.
    """

    def __init__(self, trainer: "MemoryTrainer") -> None:
        self.trainer = trainer
        self.signal: int | None = None
        self.agreed = False
        self._updating = False
        self._process = os.getpid()

    def request(self, number: int, frame) -> None:
        """Signal handler."""
        if os.getpid() != self._process:
            # Handle a signal in a forked process, which inherits the handler. Data loading workers ignore Ctrl-C, so
            # that their parent can finish the step; SIGTERM ends them as multiprocessing expects.
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif self.signal is None:
            self.signal = number
            if self.trainer.args.process_index == 0:
                again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
                # print() is not reentrant, and the handler may have interrupted one.
                os.write(2, f"\nstopping at the end of step {self.trainer.state.global_step + 1}{again}\n".encode())
        # Schedulers send SIGTERM more than once, to a launcher and to its processes; people press Ctrl-C twice, which
        # torchrun passes on as SIGINT and then SIGTERM.
        elif signal.SIGINT in (number, self.signal):
            raise self.ending("at once")

    # ---- events of the Trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._updating = True

    def on_step_end(self, args, state, control, **kwargs):
        self._updating = False
        peers = self.trainer._peers
        number = self.signal if peers.alone else peers.smallest(self.signal)
        if number is None:
            return
        self.signal, self.agreed = number, True
        control.should_training_stop, control.should_save = True, self._saves()
        control.should_evaluate = False  # it may take longer than a launcher waits

    def on_prediction_step(self, args, state, control, **kwargs):
        """Stop within an evaluation: the step before it is finished. Several processes would have to agree first."""
        if self.signal is None or args.world_size > 1:
            return
        if state.global_step and self._saves():
            self.trainer._save_checkpoint(self.trainer.model, None)
            self.trainer.callback_handler.on_save(args, state, control)
        self._leave(control)

    def on_epoch_end(self, args, state, control, **kwargs):
        """Leave train() after the Trainer has saved. The rest of it is for finished runs: it may load the best model,
        and with save_total_limit=1 delete the checkpoint just written."""
        if self.agreed:
            self._leave(control)

    # ---- the end

    def save_last_step(self) -> None:
        """Save the last finished step where training stopped within the next one."""
        trainer, runner = self.trainer, self.trainer._runner
        if not self._updating and self._saves() and runner.recovers and trainer.state.global_step:
            trainer.emergency_checkpoint()

    def ending(self, why: str = ""):
        """The exception that ends the run."""
        step, checkpoint = self.trainer.state.global_step, self.trainer.newest_checkpoint()
        kind = TrainingTerminated if self.signal == signal.SIGTERM else TrainingInterrupted
        where = f"stopped at step {step}" + f" ({why})" * bool(why)
        return kind(f"{where}; {self._describe_checkpoint(checkpoint, step)}", step, checkpoint)

    def _describe_checkpoint(self, checkpoint, step: int) -> str:
        saved = checkpoint is not None and checkpoint.endswith(f"checkpoint-{step}")
        nothing = "" if self._saves() or saved else "nothing was saved, since save_strategy is no; "
        if checkpoint is None:
            return nothing.removesuffix("; ") or "there is no checkpoint yet"
        return f"{nothing}{'saved as' if saved else 'the newest checkpoint is'} {checkpoint}"

    def _saves(self) -> bool:
        """True if the user wants checkpoints at all."""
        return self.trainer.args.save_strategy != "no"

    def _leave(self, control) -> None:
        # So that trackers close.
        self.trainer.callback_handler.on_train_end(self.trainer.args, self.trainer.state, control)
        raise self.ending()
