"""One optimizer step that survives running out of memory: it continues in smaller chunks and gives the same gradients.

What runs between two optimizer steps is a window of micro-batches. A failure in forward leaves the gradients alone:
the rest of the micro-batch continues in smaller chunks. A failure in backward leaves part of its gradients: the window
starts again, with the random numbers and the cuts that it had, up to where it failed.

Only `training_step` and `accelerator.backward` are hooked, so that nothing depends on who overrides `compute_loss`.
"""

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from hf_memopt.errors import InputError, TrainingOutOfMemory, one_line
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose, free_memory
from hf_memopt.trainer.batch_limit import BatchLimit
from hf_memopt.trainer.loss_rule import KNOWN, LossRule, find_rule, has_own_loss
from hf_memopt.trainer.optimizer_guard import guard, torch_optimizer, use_less
from hf_memopt.trainer.recoverability import Recoverability, changes_weights_in_backward, holds_whole_model
from hf_memopt.trainer.split import count_elements, tensor_shapes, tensor_versions
from hf_memopt.trainer.step_state import StepState

logger = logging.getLogger(__name__)


@dataclass
class MicroBatch:
    """A micro-batch and how far it is.

    Attributes:
        size: samples of the next chunk, at most.
        cuts: samples of every chunk that ran, in order; kept when the window starts again.
        done: chunks that ran since then.
        synced: its last chunk ends the window: gradients are reduced over processes.
        number: in its window.
        tried_again: it failed once where it could not be made smaller; what was freed since then may be enough.
        versions: of its tensors, which count what is written to them in place.
    """

    inputs: Any
    num_items: Any
    samples: int
    elements: int
    size: int
    synced: bool
    number: int
    versions: list[int]
    cuts: list[int] = field(default_factory=list)
    done: int = 0
    loss: Any = None
    tried_again: bool = False

    @property
    def position(self) -> int:
        """Samples that ran."""
        return sum(self.cuts[: self.done])

    @property
    def next_chunk(self) -> tuple[int, int]:
        """Samples from, to."""
        at = self.position
        return at, at + self.cuts[self.done] if self.done < len(self.cuts) else min(self.samples, at + self.size)

    def ran(self, start: int, stop: int, loss) -> None:
        """Note a chunk that ran to its end."""
        if self.done == len(self.cuts):
            self.cuts.append(stop - start)
        self.done += 1
        self.loss = loss if self.loss is None else self.loss + loss

    def shrink(self, size: int) -> None:
        """Continue in smaller chunks behind those that ran."""
        self.size = size
        del self.cuts[self.done :]

    def restart(self) -> None:
        """Begin anew, with the same cuts."""
        self.done, self.loss = 0, None


@dataclass
class Window:
    """The micro-batches between two optimizer steps that have been started.

    Attributes:
        state: what it began with.
        forward_began: the model itself was called, so that DDP has broadcast its buffers.
    """

    state: StepState | None = None
    started: list[MicroBatch] = field(default_factory=list)
    forward_began: bool = False


class StepRunner:
    """Runs the micro-batches and the optimizer step of a trainer, and again where memory runs out.

    Attributes:
        limit: how many samples run at once.
        window: the micro-batches since the last optimizer step.
        resume_states: by number of finished steps, what the next step begins with; of the last two, since another
            process may have finished a step less.
        stage: forward or backward, of what is running or ran last.
        running: the micro-batch that runs and the samples of its chunk.
    """

    def __init__(self, trainer, recoverability: Recoverability, limit: BatchLimit) -> None:
        self.limit = limit
        self.window = Window()
        self.resume_states: dict[int, StepState] = {}
        self.stage = "forward"
        self.running: tuple[MicroBatch | None, int] = (None, 0)
        self._trainer = trainer
        self._recoverability = recoverability
        self._failure: Diagnosis | None = None
        self._rule: LossRule | None = None
        self._asked_at = -1  # step for which the rule was last asked for
        self._weight = 1.0
        self._chunk_state: StepState | None = None
        self._backward_calls = 0
        # Until a training_step of the user's own has run, nobody knows when its forward pass ends.
        self._stage_is_known = all(
            kind.__module__.startswith(KNOWN) for kind in type(trainer).__mro__ if "training_step" in vars(kind)
        )

    @property
    def recovers(self) -> bool:
        """Whether a micro-batch that failed may run again."""
        return self._recoverability.repeats

    @property
    def splits(self) -> bool:
        """Whether a micro-batch may run in chunks."""
        return self._recoverability.splits

    @property
    def resume_state(self) -> StepState | None:
        """What the step after the last finished one begins with, where that is known."""
        return self.resume_states.get(self._trainer.state.global_step)

    def remember_state(self, ahead: int = 0) -> StepState:
        """Note the present state as what a step begins with: the next one, or one further `ahead`."""
        step = self._trainer.state.global_step + ahead
        recent = {number: state for number, state in self.resume_states.items() if number in (step - 1, step)}
        self.resume_states = recent | {step: StepState.now(self._trainer)}
        return self.resume_states[step]

    def refuse(self, reason: str, repeats: bool = True) -> None:
        """From here on, split no micro-batch, or do not even repeat it."""
        self._recoverability = replace(self._recoverability, repeats=repeats, splits=False, reason=reason)
        logger.warning("micro-batches run whole: %s", reason)

    # ---- what the trainer calls

    def begin_window(self) -> None:
        """Before the micro-batches of an optimizer step are fetched."""
        self.window, self._failure = Window(), None

    def run(self, step: Callable, model, inputs, num_items):
        """Forward and backward of a micro-batch; its loss.

        Args:
            step: the training_step of the trainer's other classes.

        Raises:
            TrainingOutOfMemory: it cannot be made to fit.
        """
        if self.recovers and not isinstance(inputs, Mapping):
            self.refuse(f"a batch is a {type(inputs).__name__}, whose samples nobody knows", repeats=False)
        micro = self._start(inputs, num_items)
        if not self.recovers:
            return self._run_once(step, model, micro)
        while True:
            try:
                for earlier in self.window.started[:-1]:  # done, unless the window has to start again
                    self._run(step, model, earlier, False)
                return self._run(step, model, micro, micro.synced)
            except TrainingOutOfMemory:
                raise
            except Exception as error:
                if self._splitting_failed(error):
                    self._restart(model)
                    continue
                self._failure = self._recoverable(error)
                traceback.clear_frames(error.__traceback__)  # they hold the activations
            free_memory()
            self._shrink(model, self._failure)

    def clip(self, clip: Callable, model):
        """Gradient clipping, which computes all norms before it scales a gradient."""
        if not self.recovers:
            return clip(model)
        first = next((weight.grad for weight in model.parameters() if weight.grad is not None), None)
        untouched = first is not None and first._version
        try:
            return clip(model)
        except Exception as error:
            found = diagnose(error)
            if not found.smaller_batch_helps or first is None or first._version != untouched:
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
            self._trainer._event("oom_recovered", stage="clipping", message=found.message)
            return norm
        self._trainer._ending.exhausted("clipping", again, self.window.started[-1], "clipping needs no micro-batch")

    def guard_optimizer(self) -> None:
        """Watch the optimizer's step, once the trainer has made it."""
        trainer = self._trainer
        if not self.recovers or hasattr(trainer.optimizer.step, "unguarded"):
            return
        inner = torch_optimizer(trainer)
        trainer.optimizer.step = guard(trainer.optimizer.step, inner, self._optimizer_survived, self._optimizer_failed)
        if trainer.args.world_size > 1:
            trainer.model.register_forward_pre_hook(self._forward_begins)

    def _forward_begins(self, *_) -> None:
        self.window.forward_began = True

    # ---- one micro-batch

    def _start(self, inputs, num_items) -> MicroBatch:
        trainer, window = self._trainer, self.window
        if window.state is None and trainer.memory_args.oom_recovery:
            window.state = self.remember_state()
        samples = trainer.count_samples(inputs) if self.recovers else 1
        elements = count_elements(inputs)
        if self.splits and samples > (fetched := _samples_fetched(trainer) or samples):
            self.refuse(f"a batch of {fetched} samples has {samples} rows: override split_batch() and count_samples()")
        size = self.limit.rows_at_once(samples, elements) if self.splits else samples
        synced = bool(trainer.accelerator.gradient_state.sync_gradients)
        number, versions = len(window.started), tensor_versions(inputs)
        micro = MicroBatch(inputs, num_items, samples, elements, size, synced, number, versions)
        window.started.append(micro)
        return micro

    def _run(self, step: Callable, model, micro: MicroBatch, synced: bool):
        """What is left of a micro-batch; the loss of all of it."""
        while micro.position < micro.samples:
            start, stop = self._next_chunk(micro)
            whole = stop - start == micro.samples
            self.running, self.stage = (micro, stop - start), "forward"
            self._chunk_state = StepState.now(self._trainer)
            inputs = micro.inputs if whole else self._trainer.split_batch(micro.inputs, start, stop)
            self._weight = 1.0 if whole else self._rule.weight(self._trainer, micro.inputs, inputs)
            inputs = type(micro.inputs)(inputs)  # compute_loss may pop from it
            with contextlib.nullcontext() if synced and stop == micro.samples else self._unsynced(model):
                loss = self._run_chunk(step, model, inputs, micro.num_items)
            micro.ran(start, stop, loss * self._weight)
        return micro.loss

    def _next_chunk(self, micro: MicroBatch) -> tuple[int, int]:
        """The next samples to run. A loss of transformers or TRL is asked for its rule when it is first split, one of
        the user's own before the first step, so that what cannot be split is said then."""
        start, stop = micro.next_chunk
        splits = stop - start < micro.samples
        if micro.samples > 1 and self._rule_is_due(splits):
            self.running, self.stage = (micro, stop - start), "forward"
            self._chunk_state = StepState.now(self._trainer)
            self._find_rule(micro, splits)
        return micro.next_chunk

    def _rule_is_due(self, splits: bool) -> bool:
        """One of the user's own may change from step to step (a term that joins later), or show only later."""
        if self._rule is None:
            return splits or (self.splits and has_own_loss(self._trainer))
        return splits and self._asked_at != self._trainer.state.global_step and has_own_loss(self._trainer)

    def _find_rule(self, micro: MicroBatch, splits: bool) -> None:
        self._asked_at = self._trainer.state.global_step
        try:
            self._rule = find_rule(self._trainer, micro.inputs, micro.num_items)
        except InputError as error:
            self.refuse(str(error))
            if splits and self._failure is not None:
                self._trainer._ending.exhausted("forward", self._failure, micro, str(error))
            if splits and self._trainer.memory_args.max_batch_size:
                raise InputError(f"max_batch_size={self._trainer.memory_args.max_batch_size}: {error}") from error
            micro.shrink(micro.samples)

    def _run_chunk(self, step: Callable, model, inputs: dict[str, Any], num_items):
        if self._weight == 0.0:  # no label counts: a mean over nothing is no number, nor is 0 times it
            inputs["labels"] = inputs["labels"].clamp(min=0)
        with self._hooked_backward():
            loss = step(model, inputs, num_items)
        if self._backward_calls != 1 and not self._stage_is_known:
            self.refuse(f"training_step calls accelerator.backward {self._backward_calls} times, not once", False)
            if self._weight != 1.0:
                raise InputError(f"a chunk has run without its weight: {self._recoverability.reason}")
        self._stage_is_known = True
        return loss

    def _run_once(self, step: Callable, model, micro: MicroBatch):
        """A micro-batch that cannot run again. The run ends with a diagnosis."""
        self.running, self.stage, self._weight = (micro, micro.samples), "forward", 1.0
        try:
            with self._hooked_backward():
                return step(model, micro.inputs, micro.num_items)
        except Exception as error:
            found, trainer = diagnose(error), self._trainer
            if found.kind is OomKind.NOT_MEMORY or not trainer.memory_args.oom_recovery:
                raise
            traceback.clear_frames(error.__traceback__)
        stepped = changes_weights_in_backward(trainer) and self.stage == "backward"
        intact = holds_whole_model(trainer) and not stepped
        trainer._ending.exhausted(self.stage, found, micro, self._recoverability.reason, intact)

    @contextlib.contextmanager
    def _hooked_backward(self) -> Iterator[None]:
        """accelerator.backward tells that the forward pass is over, and is where a chunk's loss gets its weight."""
        trainer = self._trainer
        backward = trainer.accelerator.backward
        self._backward_calls = 0

        def weighted(loss, **kwargs):
            self._backward_calls += 1
            trainer._pressure.activations_are_there()
            self.stage = "backward"
            backward(loss if self._weight == 1.0 else loss * self._weight, **kwargs)

        with mock.patch.object(trainer.accelerator, "backward", weighted):
            yield

    def _unsynced(self, model):
        trainer = self._trainer
        return trainer.accelerator.no_sync(model) if trainer.args.world_size > 1 else contextlib.nullcontext()

    # ---- after a failure

    def _splitting_failed(self, error: Exception) -> bool:
        """Whether a chunk failed for another reason than memory. The micro-batch runs whole then: chunks of it may
        be what no model takes, such as patches that belong to other samples."""
        micro, samples = self.running
        if samples >= micro.samples or self._rule is None or self._trainer.args.world_size > 1:
            return False
        if diagnose(error).kind is not OomKind.NOT_MEMORY:
            return False
        self.refuse(f"a chunk of it fails ({type(error).__name__}: {one_line(error)})", self.recovers)
        micro.restart()
        micro.shrink(micro.samples)
        return True

    def _recoverable(self, error: Exception) -> Diagnosis:
        """What the failure is; raised again unless memory ran out."""
        found = diagnose(error)
        if not found.helps_on(self._trainer.args.device):
            raise error
        micro, samples = self.running
        last = micro.synced and micro.position + samples == micro.samples
        if self._trainer.args.world_size > 1 and self._gradients_changed and last:
            self._end_together(found)
        return found

    @property
    def _gradients_changed(self) -> bool:
        return self.stage == "backward" or not self._stage_is_known

    def _shrink(self, model, found: Diagnosis) -> None:
        """Make the chunk that failed smaller, and start the window again where gradients may have been changed."""
        micro, samples = self.running
        if any(tensor_versions(started.inputs) != started.versions for started in self.window.started):
            why = "the loss changes its batch in place, which cannot run again"
            self._trainer._ending.exhausted(self.stage, found, micro, why)
        smaller = self._smaller(micro, samples, found)
        if smaller < samples:
            micro.shrink(smaller)
        self._trainer._event(
            "oom_recovered",
            stage=self.stage,
            cause=found.cause,
            message=found.message,
            micro_batch_before=samples,
            micro_batch_after=smaller,
            shapes=tensor_shapes(micro.inputs),
            dataset_indices=self._trainer._dataset_indices(micro),
        )
        if self.window.forward_began and hasattr(model, "require_forward_param_sync"):
            model.require_forward_param_sync = False  # DDP broadcasts buffers once a window: that is done
        if not self._gradients_changed:
            self._chunk_state.restore(self._trainer)
            return
        self._restart(model)

    def _restart(self, model) -> None:
        """Begin the window anew."""
        model.zero_grad()
        self.window.state.restore(self._trainer)
        for started in self.window.started:
            started.restart()

    def _smaller(self, micro: MicroBatch, samples: int, found: Diagnosis) -> int:
        """Samples of the next, smaller chunk. What cannot be split is tried once more, after freeing.

        Raises:
            TrainingOutOfMemory: it was tried again already.
        """
        reason = self._recoverability.reason if samples > 1 else ""
        if self.splits and samples > max(1, self.limit.fewest_rows):
            try:
                self._trainer.split_batch(micro.inputs, 0, 1)
                return self.limit.lower(samples, micro.elements * samples // micro.samples)
            except InputError as error:
                self.refuse(str(error))
                reason = str(error)
        if micro.tried_again:
            self._trainer._ending.exhausted(self.stage, found, micro, reason)
        micro.tried_again = True
        return samples

    def _end_together(self, found: Diagnosis) -> None:
        """A process that failed while gradients were being reduced leaves the others waiting: all end, and what
        resumes from their checkpoint runs smaller chunks."""
        micro, samples = self.running
        if samples > 1 and self.splits:
            self.limit.lower(samples, micro.elements * samples // micro.samples)
        why = "processes that have begun to reduce gradients cannot go back"
        self._trainer._ending.exhausted("backward", found, micro, why)

    # ---- the optimizer

    def _optimizer_survived(self, messages: list[str]) -> None:
        one_by_one = use_less(torch_optimizer(self._trainer))
        self._trainer._event(
            "oom_recovered",
            stage="optimizer",
            message=messages[0],
            retried=len(messages),
            one_weight_at_a_time=one_by_one,
        )

    def _optimizer_failed(self, error: BaseException, wrote: bool) -> None:
        found = diagnose(error)
        if found.kind is OomKind.NOT_MEMORY:
            return
        why = "its weights are between two steps" if wrote else "no smaller micro-batch helps an optimizer"
        self._trainer._ending.exhausted("optimizer", found, self.window.started[-1], why, intact=not wrote)


def _samples_fetched(trainer) -> int | None:
    """Samples that the data loader puts into a micro-batch; None where they vary (a budget of tokens)."""
    loader = trainer._train_loader
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "batch_size", None) if batches is not None else trainer.args.train_batch_size
