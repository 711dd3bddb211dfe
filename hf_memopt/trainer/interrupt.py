"""Ctrl-C and SIGTERM while training: the step is finished, a checkpoint is written, and the run stops.

The first signal is a request, which all processes of a run follow at the end of the same step. A second Ctrl-C stops
at once.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from transformers import ProgressCallback, TrainerCallback

from hf_memopt.errors import Terminated, one_line

# Only these are replaced: a handler of the user's own, the one of enable_jit_checkpoint (transformers saves a
# checkpoint at SIGTERM by itself then), and a signal that a background job ignores stay as they are.
_REPLACED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class _Stopped:
    """What both exceptions say.

    Attributes:
        step: the last finished step.
        checkpoint: the newest that the run wrote or resumed from, perhaps older than `step`; None without one.
        message: where the run stopped and what it left, in one sentence.
    """

    def __init__(self, message: str, step: int, checkpoint: str | None) -> None:
        super().__init__(message)
        self.message, self.step, self.checkpoint = message, step, checkpoint

    def __str__(self) -> str:
        return self.message


class TrainingInterrupted(_Stopped, KeyboardInterrupt):
    """train() was stopped by Ctrl-C (SIGINT). A KeyboardInterrupt, so that what follows train() does not run."""


class TrainingTerminated(_Stopped, Terminated):
    """train() was stopped by SIGTERM. Left alone it ends the process with exit code 143, without a traceback."""

    def __init__(self, message: str, step: int, checkpoint: str | None) -> None:
        super().__init__(message, step, checkpoint)
        self.code = 128 + signal.SIGTERM


@contextlib.contextmanager
def interruptible(trainer) -> Iterator["_StopAtStepEnd"]:
    """While it lasts, Ctrl-C and SIGTERM stop training at the end of a step.

    Yields:
        What has the attribute `signal`: the one that came, or None.

    Handlers are installed in the main thread alone (Python allows no other), and put back at the end.

    Raises:
        TrainingInterrupted, TrainingTerminated: at the end of the step, or at once after a second Ctrl-C.
    """
    stop = _StopAtStepEnd(trainer)
    trainer.add_callback(stop)
    try:
        with _handled(stop.request):
            yield stop
    except Exception as error:
        # A data loader's worker that the same signal has ended, or a process that has left already.
        if stop.signal is None:
            raise
        stop.save_last_step()
        raise stop.ending(f"{type(error).__name__}: {one_line(error)}"[:200]) from error
    except (TrainingInterrupted, TrainingTerminated):
        _close_bars(trainer)
        if stop.agreed and not trainer._peers.alone:
            trainer._peers.smallest(None)  # whoever ends first takes the store along that the others still watch
        raise
    finally:
        trainer.remove_callback(stop)


@contextlib.contextmanager
def _handled(handler) -> Iterator[None]:
    replaced = []
    if threading.current_thread() is threading.main_thread():
        replaced = [number for number, usual in _REPLACED.items() if signal.getsignal(number) is usual]
    before = {number: signal.signal(number, handler) for number in replaced}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


class _StopAtStepEnd(TrainerCallback):
    """Notes the request, and stops where every process has finished the same step. The last callback of all.

    Attributes:
        signal: the first that came, here or in another process; None while there was none.
        agreed: every process stops at the step that was finished last.
    """

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.signal: int | None = None
        self.agreed = False
        self._updating = False
        self._process = os.getpid()

    def request(self, number: int, frame) -> None:
        """The signals' handler."""
        if os.getpid() != self._process:
            _in_a_copy(number)
        elif self.signal is None:
            self.signal = number
            self._announce()
        # Schedulers send SIGTERM more than once, to a launcher and to its processes; people press Ctrl-C twice, which
        # torchrun passes on as SIGINT and then SIGTERM.
        elif signal.SIGINT in (number, self.signal):
            raise self.ending("at once")

    # ---- the Trainer's moments

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
        """An evaluation is not waited for: the step before it is finished. Several processes would have to agree."""
        if self.signal is None or args.world_size > 1:
            return
        if state.global_step and self._saves():
            self.trainer._save_checkpoint(self.trainer.model, None)
            self.trainer.callback_handler.on_save(args, state, control)
        self._leave(control)

    def on_epoch_end(self, args, state, control, **kwargs):
        """The Trainer comes here when it has saved. What comes after is for runs that finished: it may load the best
        model, and with save_total_limit=1 delete the checkpoint that was just written."""
        if self.agreed:
            self._leave(control)

    # ---- the end

    def save_last_step(self) -> None:
        """A checkpoint of the last finished step, where training broke off in the middle of the next one."""
        trainer, runner = self.trainer, self.trainer._runner
        if self._updating or not (self._saves() and runner.recovers and trainer.state.global_step):
            return
        trainer.emergency_checkpoint()

    def ending(self, why: str = ""):
        """The exception that ends the run."""
        step, checkpoint = self.trainer.state.global_step, self.trainer.newest_checkpoint()
        kind = TrainingTerminated if self.signal == signal.SIGTERM else TrainingInterrupted
        where = f"stopped at step {step}" + f" ({why})" * bool(why)
        return kind(f"{where}; {self._left(checkpoint, step)}", step, checkpoint)

    def _left(self, checkpoint, step: int) -> str:
        saved = checkpoint is not None and checkpoint.endswith(f"checkpoint-{step}")
        nothing = "" if self._saves() or saved else "nothing was saved, since save_strategy is no; "
        if checkpoint is None:
            return nothing.removesuffix("; ") or "there is no checkpoint yet"
        return f"{nothing}{'saved as' if saved else 'the newest checkpoint is'} {checkpoint}"

    def _saves(self) -> bool:
        """Whoever asked for no checkpoints gets none here either."""
        return self.trainer.args.save_strategy != "no"

    def _leave(self, control) -> None:
        self.trainer.callback_handler.on_train_end(self.trainer.args, self.trainer.state, control)  # closes trackers
        raise self.ending()

    def _announce(self) -> None:
        if self.trainer.args.process_index == 0:
            again = "; Ctrl-C again stops at once" if self.signal == signal.SIGINT else ""
            line = f"\nstopping at the end of step {self.trainer.state.global_step + 1}{again}\n"
            os.write(2, line.encode())  # print() must not be called by a handler that may have interrupted one


def _in_a_copy(number: int) -> None:
    """A process that was forked from this one has inherited the handler.

    A data loader's worker lives until its parent has finished the step; SIGTERM ends it, as multiprocessing expects.
    """
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _close_bars(trainer) -> None:
    """What is printed next begins on a line of its own."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
            callback.training_bar.close()
