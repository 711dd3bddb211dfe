"""Micro-batches that survive running out of memory: they continue in smaller chunks and give the same gradients.

A window is the micro-batches of one optimizer step. A failure in forward leaves gradients alone: the rest of the
micro-batch continues in smaller chunks. A failure in backward leaves partial gradients: the window restarts, with the
random state and the chunks that it had, up to where it failed.

Only `training_step` and `accelerator.backward` are hooked, so it does not matter who overrides `compute_loss`.
"""

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

from hf_memopt.errors import InputError, TrainingOutOfMemory, one_line
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose, free_memory
from hf_memopt.trainer.step.batch_limit import BatchLimit
from hf_memopt.trainer.step.known_code import own_substep_callback
from hf_memopt.trainer.step.loss_rule import LossRule, find_rule
from hf_memopt.trainer.step.recoverability import (
    Recoverability,
    assess_recoverability,
    changes_weights_in_backward,
    holds_whole_model,
)
from hf_memopt.trainer.step.split import count_elements, tensor_shapes, tensor_versions
from hf_memopt.trainer.step.step_state import Buffers, StepState
from hf_memopt.trainer.step.window import MicroBatch, Window

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

logger = logging.getLogger(__name__)


class StepRunner:
    """Runs a trainer's micro-batches, and again where memory runs out.

    Attributes:
        limit: how many samples run at once.
        window: the micro-batches since the last optimizer step.
        resume_states: number of finished steps -> random state and metrics that the next step starts from; of the
            last two steps, since another process may be one step behind.
        stage: "forward" or "backward", of the chunk that runs or ran last.
        running: the micro-batch that runs, and the samples in its chunk.
        buffers: the model's buffers that training changes.
    """

    def __init__(self, trainer: "MemoryTrainer", recoverability: Recoverability, limit: BatchLimit) -> None:
        self.limit = limit
        self.window = Window()
        self.resume_states: dict[int, StepState] = {}
        self.stage = "forward"
        self.running: tuple[MicroBatch | None, int] = (None, 0)
        self._trainer = trainer
        self._recoverability = recoverability
        self._failure: Diagnosis | None = None  # of this window
        self._rule: LossRule | None = None
        self._weight = 1.0  # of the chunk's loss in its micro-batch's
        self._chunk_state: StepState | None = None  # before the chunk that runs
        self._first_state: StepState | None = None  # before the first chunk of the micro-batch that runs
        copied = trainer.memory_args.oom_recovery and holds_whole_model(trainer)
        self.buffers = Buffers(trainer, own=recoverability.own_loss, copied=copied)

    @property
    def recovers(self) -> bool:
        """True if a micro-batch that failed may run again."""
        return self._recoverability.repeats

    @property
    def splits(self) -> bool:
        """True if a micro-batch may run in chunks."""
        return self._recoverability.splits

    @property
    def own_loss(self) -> bool:
        """True if the loss, the model or a hook is a user's own."""
        return self._recoverability.own_loss

    @property
    def resume_state(self) -> StepState | None:
        """The state that the step after the last finished one starts from, where that is known."""
        return self.resume_states.get(self._trainer.state.global_step)

    def remember_state(self, ahead: int = 0) -> StepState:
        """Keep the present state as what the next step starts from, or the one `ahead` steps later."""
        step = self._trainer.state.global_step + ahead
        recent = {number: state for number, state in self.resume_states.items() if number in (step - 1, step)}
        self.resume_states = recent | {step: StepState.now(self._trainer)}
        return self.resume_states[step]

    def refuse(self, reason: str, repeats: bool = True) -> None:
        """Split no more micro-batches; without `repeats`, do not run them again either."""
        self._recoverability = replace(self._recoverability, repeats=repeats, splits=False, reason=reason)
        logger.warning("micro-batches run whole: %s", reason)

    # ---- what the trainer calls

    def begin_window(self) -> None:
        """Start an optimizer step, before its micro-batches are fetched."""
        self.window, self._failure = Window(), None

    def note_forward(self, *_) -> None:
        """Forward pre-hook of the DDP model."""
        self.window.forward_began = True

    def run(self, step: Callable, model, inputs, num_items):
        """Run forward and backward of a micro-batch.

        Args:
            step: `training_step` of the trainer's other base classes.

        Returns:
            Its loss, detached.

        Raises:
            TrainingOutOfMemory: it cannot be made to fit.
        """
        if self.recovers and not isinstance(inputs, Mapping):
            self.refuse(f"a batch is a {type(inputs).__name__}, not a mapping of tensors", repeats=False)
        micro = self._start(inputs, num_items)
        if not self.recovers:
            return self._run_once(step, model, micro)
        while True:
            try:
                for earlier in self.window.started[:-1]:  # done already, unless the window restarted
                    self._run(step, model, earlier, False)
                return self._run(step, model, micro, micro.synced)
            except TrainingOutOfMemory:
                raise
            except Exception as error:
                if self._splitting_failed(error):
                    self._restart(model)
                    continue
                self._failure = self._check_recoverable(error)
                traceback.clear_frames(error.__traceback__)  # the frames hold activations
            # Outside of `except`: while the exception is handled, it keeps its traceback and so the activations alive.
            free_memory()
            if reason := self._why_not_again():
                self._trainer._ending.end_run(self.stage, self._failure, micro, reason)
            self._shrink(model, self._failure)

    # ---- one micro-batch

    def _start(self, inputs, num_items) -> MicroBatch:
        trainer, window = self._trainer, self.window
        if window.state is None and trainer.memory_args.oom_recovery:
            window.state = self.remember_state()
        samples = trainer.count_samples(inputs) if self.recovers else 1
        elements = count_elements(inputs)
        batches = getattr(trainer._train_loader, "batch_sampler", None)
        # They vary under max_tokens_per_batch, whose sampler has no batch_size.
        fetched = trainer.args.train_batch_size if batches is None else getattr(batches, "batch_size", None)
        if self.splits and fetched and samples > fetched:
            self.refuse(f"a batch of {fetched} samples has {samples} rows: override split_batch() and count_samples()")
        size = self.limit.chunk_size(samples, elements) if self.splits else samples
        # The Trainer sets it for each micro-batch itself (_set_sync_gradients in _run_epoch, transformers 5.23).
        synced = bool(trainer.accelerator.gradient_state.sync_gradients)
        micro = MicroBatch(
            inputs, num_items, samples, elements, size, synced, len(window.started), tensor_versions(inputs)
        )
        window.started.append(micro)
        return micro

    def _run(self, step: Callable, model, micro: MicroBatch, synced: bool):
        """Run what is left of a micro-batch; the loss of all of it.

        Args:
            synced: its last chunk reduces the gradients over processes.
        """
        accelerator = self._trainer.accelerator
        while micro.position < micro.samples:
            start, stop = micro.next_chunk
            if stop - start < micro.samples and self._rule is None:
                self.running, self.stage = (micro, stop - start), "forward"
                self._chunk_state = StepState.now(self._trainer)
                self._find_rule(micro)  # it runs whole where there is none
                start, stop = micro.next_chunk
            is_whole, is_last = stop - start == micro.samples, stop == micro.samples
            self.running, self.stage = (micro, stop - start), "forward"
            if start and self.own_loss:  # a counter in a user's own loss counts micro-batches, not chunks
                self._first_state.restore_numbers(self._trainer)
            self._chunk_state = StepState.now(self._trainer)
            if not start:
                self._first_state = self._chunk_state
            inputs = micro.inputs if is_whole else self._trainer.split_batch(micro.inputs, start, stop)
            self._weight = 1.0 if is_whole else self._rule.weight(self._trainer, micro.inputs, inputs)
            inputs = type(micro.inputs)(inputs)  # a copy: compute_loss may pop from it
            if self._weight == 0.0:  # every label is -100: the mean is NaN, and so would 0 × NaN be
                inputs["labels"] = inputs["labels"].clamp(min=0)
            alone = self._trainer.args.world_size == 1
            reduced = contextlib.nullcontext() if alone or (synced and is_last) else accelerator.no_sync(model)
            with reduced, self._hooked_backward():
                loss = step(model, inputs, micro.num_items)
            if not is_whole and (changed := self.buffers.changed_since(self._chunk_state)):
                raise InputError(_changes(changed))
            micro.record_chunk(start, stop, loss * self._weight)
        if (changed := self.buffers.note_changed(self._first_state)) and self.splits:
            self.refuse(_changes(changed))
        return micro.loss

    def _find_rule(self, micro: MicroBatch) -> None:
        """Determine the rule of the loss, when a micro-batch is first split."""
        try:
            # Asked again, since hooks may have come since the trainer was made, and nothing may have failed before.
            assessment = assess_recoverability(self._trainer)
            self._recoverability = replace(self._recoverability, own_loss=assessment.own_loss)
            if not assessment.splits:
                raise InputError(assessment.reason)
            self._rule = find_rule(self._trainer, micro.inputs, micro.num_items)
        except InputError as error:
            self.refuse(str(error))
            if self._failure is not None:
                self._trainer._ending.end_run("forward", self._failure, micro, str(error))
            if self._trainer.memory_args.max_batch_size:
                raise InputError(f"max_batch_size={self._trainer.memory_args.max_batch_size}: {error}") from error
            micro.shrink(micro.samples)

    def _run_once(self, step: Callable, model, micro: MicroBatch):
        """Run a micro-batch that cannot run again: if memory runs out, the run ends with a diagnosis."""
        self.running, self.stage, self._weight = (micro, micro.samples), "forward", 1.0
        try:
            with self._hooked_backward():
                loss = step(model, micro.inputs, micro.num_items)
            if self.window.state is not None:
                self.buffers.note_changed(self.window.state)
            return loss
        except TrainingOutOfMemory:  # generation has ended the run
            raise
        except Exception as error:
            diagnosis, trainer = diagnose(error), self._trainer
            if diagnosis.kind is OomKind.NOT_MEMORY or not trainer.memory_args.oom_recovery:
                raise
            traceback.clear_frames(error.__traceback__)
        stepped = changes_weights_in_backward(trainer) and self.stage == "backward"
        intact = holds_whole_model(trainer) and not stepped
        trainer._ending.end_run(self.stage, diagnosis, micro, self._recoverability.reason, intact)

    @contextlib.contextmanager
    def _hooked_backward(self) -> Iterator[None]:
        """Replace accelerator.backward, the one public call between forward and backward.

        There the stage changes and a chunk's loss gets its weight; Trainer.training_step (transformers 5.23) calls it
        once, with the loss already divided. It can go when the Trainer has a callback between the two.
        """
        trainer = self._trainer
        backward = trainer.accelerator.backward

        def weighted(loss, **kwargs):
            trainer._pressure.note_activations()
            self.stage = "backward"
            backward(loss if self._weight == 1.0 else loss * self._weight, **kwargs)

        with mock.patch.object(trainer.accelerator, "backward", weighted):
            yield

    # ---- after a failure

    def _splitting_failed(self, error: Exception) -> bool:
        """True if a chunk failed for another reason than memory: the model does not accept parts of this batch (image
        patches that belong to other samples). The micro-batch then runs whole."""
        micro, samples = self.running
        whole = samples >= micro.samples or self._rule is None
        if whole or self._trainer.args.world_size > 1 or diagnose(error).kind is not OomKind.NOT_MEMORY:
            return False
        failed = f"a chunk of it fails ({type(error).__name__}: {one_line(error)})"
        self.refuse(str(error) if isinstance(error, InputError) else failed, self.recovers)
        micro.restart()
        micro.shrink(micro.samples)
        return True

    def _check_recoverable(self, error: Exception) -> Diagnosis:
        """Diagnose a failure; raise it again unless a smaller chunk may help.

        All processes end where one fails while gradients are reduced, which leaves the others waiting in the
        all-reduce. The limit is halved first, so that the run that resumes starts with smaller chunks.
        """
        diagnosis = diagnose(error)
        if not diagnosis.helps_on(self._trainer.args.device):
            raise error
        micro, samples = self.running
        last = micro.synced and micro.position + samples == micro.samples
        if self._trainer.args.world_size > 1 and self.stage == "backward" and last:
            if samples > 1 and self.splits:
                self.limit.halve(samples, micro.elements * samples // micro.samples)
            why = "processes that have begun to reduce gradients cannot go back"
            self._trainer._ending.end_run("backward", diagnosis, micro, why)
        return diagnosis

    def _why_not_again(self) -> str:
        """The reason that the micro-batch that failed cannot run again; "" where it can.

        Asked after a failure, since hooks and callbacks may have come since the trainer was made.
        """
        assessment = assess_recoverability(self._trainer)
        if not assessment.repeats:
            return assessment.reason
        restarts = self.stage == "backward" and len(self.window.started) > 1
        if restarts and (callback := own_substep_callback(self._trainer)):
            return f"{callback}, and a step that starts again would do without it"
        if self.buffers.written() != self._chunk_state.written:
            return "the loss changes weights or buffers before it fails"
        if changed := self.splits and self.buffers.changed_since(self._chunk_state):
            self.refuse(_changes(changed))
        return ""

    def _shrink(self, model, diagnosis: Diagnosis) -> None:
        """Make the chunk that failed smaller, and restart the window where gradients may have changed."""
        micro, samples = self.running
        if any(tensor_versions(started.inputs) != started.versions for started in self.window.started):
            why = "the loss changes its batch in place, which cannot run again"
            self._trainer._ending.end_run(self.stage, diagnosis, micro, why)
        smaller = self._smaller(micro, samples, diagnosis)
        if smaller < samples:
            micro.shrink(smaller)
        shapes, indices = tensor_shapes(micro.inputs), self._trainer._dataset_indices(micro)
        self._trainer._recovered(self.stage, diagnosis, samples, smaller, shapes=shapes, dataset_indices=indices)
        # DDP (torch 2.13) broadcasts buffers in the first forward of a window. A second broadcast would wait for
        # processes that do not repeat theirs, so its private flag is lowered; DDP raises it again
        # in the forward whose gradients it reduces.
        if self.window.forward_began and hasattr(model, "require_forward_param_sync"):
            model.require_forward_param_sync = False
        if self.stage == "backward":
            self._restart(model)
        else:
            self._chunk_state.restore(self._trainer)

    def _restart(self, model) -> None:
        """Run the window again from its start."""
        model.zero_grad()
        self.window.state.restore(self._trainer)
        for started in self.window.started:
            started.restart()

    def _smaller(self, micro: MicroBatch, samples: int, diagnosis: Diagnosis) -> int:
        """Samples in the next, smaller chunk. What cannot be split is run once more, after freeing memory.

        Raises:
            TrainingOutOfMemory: that failed before.
        """
        reason = self._recoverability.reason if samples > 1 else ""
        if self.splits and samples > max(1, self.limit.min_samples):
            try:
                self._trainer.split_batch(micro.inputs, 0, 1)
                return self.limit.halve(samples, micro.elements * samples // micro.samples)
            except InputError as error:
                self.refuse(str(error))
                reason = str(error)
        if micro.retried_whole:
            self._trainer._ending.end_run(self.stage, diagnosis, micro, reason)
        micro.retried_whole = True
        return samples


def _changes(name: str) -> str:
    return f"{name} changes in every training pass, and would change once for each chunk"
