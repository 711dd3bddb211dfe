"""Evaluation that recovers from running out of memory, and that keeps argmax tokens instead of logits."""

import traceback

import numpy
import torch

from hf_memopt.levers.answer_logits import nothing_but_loss
from hf_memopt.oom.classify import OomKind, diagnose, free_memory
from hf_memopt.trainer.recoverability import holds_whole_model
from hf_memopt.trainer.step_state import StepState


class ArgmaxLogits:
    """Stands in for logits of which only the argmax was kept.

    It has the logits' shape, (samples, tokens, vocabulary), can be sliced by samples and tokens, and `argmax` over the
    vocabulary gives what the logits' own would. Everything else raises TypeError rather than give a wrong result.

    Args:
        tokens: argmax, (samples, tokens); negative where the Trainer padded predictions (with -100 for every class).
        vocabulary: size of the last axis of the logits.
    """

    ndim = 3

    def __init__(self, tokens: numpy.ndarray, vocabulary: int) -> None:
        self._tokens = tokens
        self.shape = (*tokens.shape, vocabulary)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index) -> "ArgmaxLogits":
        index = index if isinstance(index, tuple) else (index,)
        if any(part is not Ellipsis and not isinstance(part, slice) for part in index):
            raise _needs_logits("an index that is not a slice")
        if Ellipsis in index:
            position = index.index(Ellipsis)
            missing = self.ndim + 1 - len(index)
            index = (*index[:position], *[slice(None)] * missing, *index[position + 1 :])
        if len(index) > self.ndim or index.count(Ellipsis):
            raise IndexError(f"too many indices: the logits have {self.ndim} dimensions")
        if any(part != slice(None) for part in index[2:]):
            raise _needs_logits("a part of the vocabulary")
        return ArgmaxLogits(self._tokens[index[:2]], self.shape[2])

    def __iter__(self):
        raise _needs_logits("single samples")

    def __eq__(self, other):
        raise _needs_logits("a comparison")

    __hash__ = None

    def argmax(self, axis=None, out=None, *, keepdims: bool = False) -> numpy.ndarray:
        """numpy.argmax of the logits over the vocabulary."""
        if axis not in (-1, 2) or out is not None or keepdims not in (False, numpy._NoValue):
            raise _needs_logits("an argmax over another axis than the last")
        return numpy.maximum(self._tokens, 0)  # where all logits are equal, numpy.argmax gives 0

    def __array_function__(self, function, types, args, kwargs):
        if function is numpy.argmax and args and args[0] is self:
            return self.argmax(*args[1:], **kwargs)
        if function in (numpy.shape, numpy.ndim) and args and args[0] is self:
            return self.shape if function is numpy.shape else self.ndim
        raise _needs_logits(f"numpy.{function.__name__}")

    def __array_ufunc__(self, ufunc, *_, **__):
        raise _needs_logits(f"numpy.{ufunc.__name__}")

    def __array__(self, *_, **__):
        raise _needs_logits("a plain array")

    def __getattr__(self, name: str):
        if name.startswith("__"):  # protocols that numpy looks for, such as __array_interface__
            raise AttributeError(name)
        raise _needs_logits(f".{name}")


def _needs_logits(what: str) -> TypeError:
    return TypeError(
        f"compute_metrics uses {what} of the logits, but reduce_eval_logits=True kept only their argmax: leave it "
        "out, or pass your own preprocess_logits_for_metrics"
    )


class EvalRecovery:
    """The part of MemoryTrainerMixin that is about evaluation."""

    def evaluation_loop(self, dataloader, *args, **kwargs):
        before = StepState.now(self)
        if self.is_in_train:
            self._runner.remember_state()  # the step is finished: the next one starts from this state
        while True:
            try:
                with _ReducedLogits(self):
                    return super().evaluation_loop(dataloader, *args, **kwargs)
            except Exception as error:
                diagnosis = diagnose(error)
                if diagnosis.kind is OomKind.NOT_MEMORY or not self.memory_args.oom_recovery:
                    raise
                if reason := self._why_not_halved(diagnosis):
                    self._ending.end_run("eval", diagnosis, why=reason, intact=holds_whole_model(self))
                traceback.clear_frames(error.__traceback__)
            free_memory()
            self._halve_eval_batch(diagnosis)
            before.restore(self)
            self._close_progress_bar()
            dataloader = self.get_eval_dataloader(dataloader.dataset)

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        with nothing_but_loss(self.accelerator.unwrap_model(model), prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def _why_not_halved(self, diagnosis) -> str:
        """Why the evaluation is not repeated with smaller batches; "" where it is."""
        if not diagnosis.helps_on(self.args.device):
            return "no smaller evaluation batch helps there"
        return "processes that evaluate together cannot repeat a batch" if self.args.world_size > 1 else ""

    def _halve_eval_batch(self, diagnosis) -> None:
        before = self.args.per_device_eval_batch_size
        if before <= 1:
            self._ending.end_run("eval", diagnosis, why="the evaluation batch is one sample")
        self.args.per_device_eval_batch_size = before // 2
        # With dataloader_persistent_workers the Trainer keeps the loaders here, with the old size (transformers 5.23).
        getattr(self, "_eval_dataloaders", {}).clear()
        self._event(
            "oom_recovered",
            stage="eval",
            cause=diagnosis.cause,
            message=diagnosis.message,
            micro_batch_before=before,
            micro_batch_after=before // 2,
        )

    def _close_progress_bar(self) -> None:
        """Close the failed attempt's bar: ProgressCallback would continue to count in it, beyond its total."""
        for callback in self.callback_handler.callbacks:
            bar = getattr(callback, "prediction_bar", None)
            if bar is not None:
                bar.close()
                callback.prediction_bar = None


class _ReducedLogits:
    """A context in which a language model's logits are reduced to their argmax before they are kept for metrics."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.applies = (
            trainer.memory_args.reduce_eval_logits
            and trainer.compute_metrics is not None
            and trainer.preprocess_logits_for_metrics is None
        )
        self.vocabulary: int | None = None  # of the logits that were reduced

    def __enter__(self):
        if self.applies:
            self.metrics = self.trainer.compute_metrics
            self.trainer.preprocess_logits_for_metrics = self._reduce
            self.trainer.compute_metrics = self._with_argmax

    def __exit__(self, *_):
        if self.applies:
            self.trainer.preprocess_logits_for_metrics = None
            self.trainer.compute_metrics = self.metrics

    def _reduce(self, logits, labels):
        if isinstance(logits, torch.Tensor) and logits.dim() == 3:
            self.vocabulary = logits.shape[-1]
            return logits.argmax(-1)
        return logits

    def _with_argmax(self, prediction, *args, **kwargs):
        if self.vocabulary is not None:
            prediction.predictions = ArgmaxLogits(prediction.predictions, self.vocabulary)
        return self.metrics(prediction, *args, **kwargs)
