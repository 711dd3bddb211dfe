"""Gradient clipping and the optimizer step, repeated where they ran out of memory before writing anything."""

import traceback
from collections.abc import Callable

from hf_memopt.oom.classify import OomKind, diagnose, free_memory
from hf_memopt.trainer.step.known_code import defined_by_user
from hf_memopt.trainer.step.optimizer_guard import guard, torch_optimizer, use_less
from hf_memopt.trainer.step.recoverability import changes_weights_in_backward, holds_whole_model
from hf_memopt.trainer.step.runner import StepRunner


class UpdateRecovery:
    """Recovers what runs after the last backward of a window."""

    def __init__(self, trainer, runner: StepRunner) -> None:
        self._trainer = trainer
        self._runner = runner

    @property
    def _repeats(self) -> bool:
        """True if an update that has written nothing may run again: no code of the loss's is called."""
        trainer = self._trainer
        if not trainer.memory_args.oom_recovery or trainer.args.n_gpu > 1:
            return False
        return holds_whole_model(trainer) and not changes_weights_in_backward(trainer)

    def clip(self, clip: Callable, model):
        """Clip gradients, a second time after freeing memory if the first attempt changed no gradient.

        `clip_grad_norm_` computes all norms before it scales the first gradient, so one `_version` tells whether
        scaling has begun.

        Raises:
            TrainingOutOfMemory: the second attempt ran out of memory too.
        """
        if not self._repeats or defined_by_user(type(self._trainer), "_clip_grad_norm"):
            return clip(model)
        first = next((weight.grad for weight in model.parameters() if weight.grad is not None), None)
        version = first is not None and first._version
        try:
            return clip(model)
        except Exception as error:
            diagnosis = diagnose(error)
            if not diagnosis.smaller_batch_helps or first is None or first._version != version:
                raise
            traceback.clear_frames(error.__traceback__)
        free_memory()
        try:
            norm = clip(model)
        except Exception as error:
            again = diagnose(error)
            if again.kind is OomKind.NOT_MEMORY:
                raise
            traceback.clear_frames(error.__traceback__)
        else:
            self._trainer._event("oom_recovered", stage="clipping", message=diagnosis.message)
            return norm
        self._end_run("clipping", again, "clipping needs no micro-batch")

    def guard_optimizer(self) -> None:
        """Watch the optimizer's step, once the Trainer has made the optimizer."""
        trainer = self._trainer
        if not self._repeats or hasattr(trainer.optimizer.step, "unguarded"):
            return
        inner = torch_optimizer(trainer)
        trainer.optimizer.step = guard(trainer.optimizer.step, inner, self._survived, self._failed)

    def _survived(self, messages: list[str]) -> None:
        one_by_one = use_less(torch_optimizer(self._trainer))
        self._trainer._event(
            "oom_recovered",
            stage="optimizer",
            message=messages[0],
            retried=len(messages),
            one_weight_at_a_time=one_by_one,
        )

    def _failed(self, error: BaseException, wrote: bool) -> None:
        diagnosis = diagnose(error)
        if diagnosis.kind is OomKind.NOT_MEMORY:
            return
        why = "its weights are between two steps" if wrote else "no smaller micro-batch helps an optimizer"
        self._end_run("optimizer", diagnosis, why, intact=not wrote)

    def _end_run(self, stage: str, diagnosis, why: str, intact: bool = True) -> None:
        self._trainer._ending.end_run(stage, diagnosis, self._runner.window.started[-1], why, intact)
