"""Evaluation that recovers from running out of memory, and that keeps argmax tokens instead of logits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy
import torch

from hf_memopt.errors import InputError
from hf_memopt.levers.answer_logits import nothing_but_loss
from hf_memopt.oom.classify import Diagnosis, free_memory
from hf_memopt.trainer.step.loss_rule import LossRule, find_rule
from hf_memopt.trainer.step.recoverability import holds_whole_model, why_not_evaluated_in_chunks
from hf_memopt.trainer.step.step_state import StepState

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer


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
    """The part of MemoryTrainerMixin that is about evaluation.

    A batch that does not fit is evaluated in chunks, whose outputs are joined: what is then done with the batch (sums
    of `batch_eval_metrics`, metrics, callbacks) is done once, and with the same values.
    """

    _evaluated_at_once: int | None = None  # samples, where a batch did not fit whole
    _eval_failure: Diagnosis | None = None
    _eval_rule: LossRule | None = None

    def evaluation_loop(self, *args, **kwargs):
        if self.is_in_train:
            self._runner.remember_state()  # the step is finished: the next one starts from this state
        try:
            with _reduced_logits(self):
                return super().evaluation_loop(*args, **kwargs)
        except Exception as error:
            diagnosis = self._ending.explain(error)
        why = "no smaller evaluation batch helps what is kept and computed of all batches"
        self._ending.end_run("eval", diagnosis, why=why, intact=holds_whole_model(self))

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        usual, before = super().prediction_step, StepState.now(self, buffers=False)

        def predict(part):
            with nothing_but_loss(self.accelerator.unwrap_model(model), prediction_loss_only):
                return usual(model, part, prediction_loss_only, *args, **kwargs)

        while True:
            try:
                if self._evaluated_at_once is None or self.count_samples(inputs) <= self._evaluated_at_once:
                    return predict(inputs)
                return self._predict_in_chunks(predict, inputs, before)
            except Exception as error:
                diagnosis = self._ending.explain(error)
            free_memory()  # outside of `except`, which keeps the traceback and so the tensors alive
            before.restore(self)
            self._halve_evaluation(inputs, diagnosis)

    def _predict_in_chunks(self, predict, inputs, before: StepState):
        """Loss, outputs and labels of an evaluation batch, from those of its chunks.

        Args:
            before: the state that each chunk starts from.

        Raises:
            TrainingOutOfMemory: the loss or the outputs of chunks cannot be joined.
        """
        samples, size = self.count_samples(inputs), self._evaluated_at_once
        try:
            parts = [self.split_batch(inputs, at, min(samples, at + size)) for at in range(0, samples, size)]
            losses, outputs, labels = [], [], []
            for part in parts:
                before.restore_numbers(self)
                loss, output, label = predict(type(inputs)(part))
                losses.append(loss)
                outputs.append(output)
                labels.append(label)
            counts = [self.count_samples(part) for part in parts]
            return self._join_losses(inputs, parts, losses), join(outputs, counts), join(labels, counts)
        except InputError as error:
            reason = str(error)
        self._ending.end_run("eval", self._eval_failure, why=reason, intact=holds_whole_model(self))

    def _join_losses(self, inputs, parts, losses):
        if losses[0] is None:
            return None
        items = self._get_num_items_in_batch([inputs], self.args.device)
        self._eval_rule = self._eval_rule or find_rule(self, inputs, items)
        if self._eval_rule is LossRule.SUM:  # of each chunk, divided by that chunk's own number
            weights = [float(self._get_num_items_in_batch([part], self.args.device) / items) for part in parts]
        else:
            weights = [self._eval_rule.weight(self, inputs, part) for part in parts]
        # Chunks of weight 0 are left out: their losses are means over no label, NaN.
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)

    def _halve_evaluation(self, inputs, diagnosis) -> None:
        """Choose smaller chunks for evaluation, or end the run where these would not give the same results."""
        samples = min(self._evaluated_at_once or self.count_samples(inputs), self.count_samples(inputs))
        reason = "" if diagnosis.helps_on(self.args.device) else "no smaller evaluation batch helps there"
        one_sample = "the evaluation batch is one sample" if samples <= 1 else ""
        if reason := reason or why_not_evaluated_in_chunks(self) or one_sample:
            self._ending.end_run("eval", diagnosis, why=reason, intact=holds_whole_model(self))
        self._evaluated_at_once, self._eval_failure = samples // 2, diagnosis
        self._recovered("eval", diagnosis, samples, samples // 2)


def join(parts: list, counts: list[int]):
    """The outputs of a batch from those of its chunks: tensors of one row per sample, or nested tuples of them.

    Raises:
        InputError: an output is not by sample, or not of the same shape in all chunks.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        by_sample = all(part.dim() and len(part) == count for part, count in zip(parts, counts, strict=True))
        if not by_sample or len({part.shape[1:] for part in parts}) > 1:
            raise InputError(f"an output of shape {tuple(first.shape)} is not by sample")
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return type(first)({name: join([part[name] for part in parts], counts) for name in first})
    if isinstance(first, list | tuple):
        return type(first)(join(list(inner), counts) for inner in zip(*parts, strict=True))
    if first is None:
        return None
    raise InputError(f"an output is a {type(first).__name__}")


@contextmanager
def _reduced_logits(trainer: "MemoryTrainer") -> Iterator[None]:
    """A context in which a language model's logits are reduced to their argmax before they are kept for metrics."""
    metrics, own = trainer.compute_metrics, trainer.preprocess_logits_for_metrics
    if not trainer.memory_args.reduce_eval_logits or metrics is None or own is not None:
        yield
        return
    vocabulary: int | None = None  # of the logits that were reduced

    def reduce(logits, labels):
        nonlocal vocabulary
        if isinstance(logits, torch.Tensor) and logits.dim() == 3:
            vocabulary = logits.shape[-1]
            return logits.argmax(-1)
        return logits

    def with_argmax(prediction, *args, **kwargs):
        if vocabulary is not None:
            prediction.predictions = ArgmaxLogits(prediction.predictions, vocabulary)
        return metrics(prediction, *args, **kwargs)

    trainer.preprocess_logits_for_metrics, trainer.compute_metrics = reduce, with_argmax
    try:
        yield
    finally:
        trainer.preprocess_logits_for_metrics, trainer.compute_metrics = None, metrics
