"""Evaluation that does not run out of memory: smaller batches on failure, and no more logits than metrics need."""

import traceback

import numpy
import torch

from hf_memopt.levers.answer_logits import nothing_but_loss
from hf_memopt.training.oom import diagnose, free_memory
from hf_memopt.training.random_state import RandomState

_VOCABULARY = 1000  # an output with as many classes per token is a language model's


class Likeliest(numpy.ndarray):
    """The likeliest token of every position, standing for logits of which nothing else was kept.

    `argmax` over the last axis gives the tokens; whatever else is asked of it is refused, since it would be wrong.
    """

    def argmax(self, axis=None, out=None, **_):
        if axis not in (-1, self.ndim):
            raise _needs_logits("argmax over another axis than the last")
        return self.view(numpy.ndarray)

    def __array_function__(self, function, types, args, kwargs):
        if function is numpy.argmax and args and args[0] is self:
            return self.argmax(*args[1:], **kwargs)
        raise _needs_logits(f"numpy.{function.__name__}")

    def __array_ufunc__(self, ufunc, *_, **__):
        raise _needs_logits(f"numpy.{ufunc.__name__}")

    def __array__(self, *_, **__):
        raise _needs_logits("a plain array")


def _needs_logits(what: str) -> TypeError:
    return TypeError(
        f"compute_metrics wants {what} of the logits, but only the likeliest tokens were kept: pass "
        "MemoryArguments(reduce_eval_logits=False), or a preprocess_logits_for_metrics of your own"
    )


class EvalRecovery:
    """The part of MemoryTrainerMixin that is about evaluation."""

    def evaluation_loop(self, dataloader, *args, **kwargs):
        began = RandomState.now()
        while True:
            try:
                with _ReducedLogits(self):
                    return super().evaluation_loop(dataloader, *args, **kwargs)
            except Exception as error:
                found = diagnose(error)
                if not (found.helps_on(self.args.device) and self.memory_args.oom_recovery):
                    raise
                if self.args.world_size > 1:
                    raise  # the others wait in a gather
                traceback.clear_frames(error.__traceback__)
            free_memory()
            self._halve_eval_batch(found)
            began.restore()
            self._close_bars()
            dataloader = self.get_eval_dataloader(dataloader.dataset)

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        with nothing_but_loss(self.accelerator.unwrap_model(model), prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def _halve_eval_batch(self, found) -> None:
        before = self.args.per_device_eval_batch_size
        if before <= 1:
            self._exhausted_in_eval(found)
        self.args.per_device_eval_batch_size = before // 2
        getattr(self, "_eval_dataloaders", {}).clear()
        self._event("oom_recovered", stage="eval", cause=found.cause, message=found.message,
                    micro_batch_before=before, micro_batch_after=before // 2)  # fmt: skip

    def _close_bars(self) -> None:
        """A progress bar of the attempt that failed would count on beyond its end."""
        for callback in self.callback_handler.callbacks:
            bar = getattr(callback, "prediction_bar", None)
            if bar is not None:
                bar.close()
                callback.prediction_bar = None


class _ReducedLogits:
    """While it lasts, a language model's logits are reduced to their argmax before they are kept for metrics."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.applies = (
            trainer.memory_args.reduce_eval_logits
            and trainer.compute_metrics is not None
            and trainer.preprocess_logits_for_metrics is None
        )
        self.reduced = False

    def __enter__(self):
        if self.applies:
            self.metrics = self.trainer.compute_metrics
            self.trainer.preprocess_logits_for_metrics = self._reduce
            self.trainer.compute_metrics = self._with_likeliest

    def __exit__(self, *_):
        if self.applies:
            self.trainer.preprocess_logits_for_metrics = None
            self.trainer.compute_metrics = self.metrics

    def _reduce(self, logits, labels):
        if isinstance(logits, torch.Tensor) and logits.dim() == 3 and logits.shape[-1] >= _VOCABULARY:
            self.reduced = True
            return logits.argmax(-1)
        return logits

    def _with_likeliest(self, prediction, *args, **kwargs):
        if self.reduced:
            prediction.predictions = prediction.predictions.view(Likeliest)
        return self.metrics(prediction, *args, **kwargs)
