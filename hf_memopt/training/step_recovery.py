"""Running out of memory inside a training step: the step goes on in smaller pieces and gives the same gradients.

What runs between two optimizer steps is a window of micro-batches. A failure in forward leaves the gradients alone:
the rest of the micro-batch goes on in smaller pieces. A failure in backward leaves part of a micro-batch's gradients:
the window starts again, with the random numbers and the cuts that it had, up to where it failed.
"""

import contextlib
import traceback
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.training.batch_limit import BatchLimit
from hf_memopt.training.guarded_optimizer import guard, torch_optimizer, use_less
from hf_memopt.training.loss_scale import loss_is_a_sum, loss_items
from hf_memopt.training.oom import Diagnosis, OomKind, diagnose, free_memory
from hf_memopt.training.pieces import elements_of, piece_of, rows_of, shapes_of
from hf_memopt.training.random_state import RandomState


@dataclass
class MicroBatch:
    """A micro-batch and how far it is.

    Attributes:
        size: samples that the next piece has at most.
        cuts: samples of every piece that was run, in order; kept when the window starts again.
        done: pieces that have been run since then.
        synced: its last piece ends the window: gradients are reduced over processes.
        number: in its window.
        tried_again: one sample alone failed once; what was freed since then may be enough.
    """

    inputs: dict[str, Any]
    num_items: Any
    rows: int
    elements: int
    size: int
    synced: bool
    number: int
    cuts: list[int] = field(default_factory=list)
    done: int = 0
    loss: Any = None
    tried_again: bool = False

    @property
    def at(self) -> int:
        """Samples that have been run."""
        return sum(self.cuts[: self.done])

    @property
    def next_piece(self) -> tuple[int, int]:
        """Samples from, to."""
        at = self.at
        return at, at + self.cuts[self.done] if self.done < len(self.cuts) else min(self.rows, at + self.size)

    def ran(self, start: int, stop: int, loss) -> None:
        """Note a piece that was run to its end."""
        if self.done == len(self.cuts):
            self.cuts.append(stop - start)
        self.done += 1
        self.loss = loss if self.loss is None else self.loss + loss

    def cut_smaller(self, size: int) -> None:
        """Have what follows the pieces that were run go on in smaller ones."""
        self.size = size
        del self.cuts[self.done :]

    def again(self) -> None:
        """Begin anew, with the same cuts."""
        self.done, self.loss = 0, None


@dataclass
class Window:
    """The micro-batches between two optimizer steps that have been started, and the random numbers they began with.

    Attributes:
        forward_began: the model itself was called, so that DDP has broadcast its buffers.
    """

    began: RandomState | None = None
    started: list[MicroBatch] = field(default_factory=list)
    forward_began: bool = False


class StepRecovery:
    """The part of MemoryTrainerMixin that recovers forward, backward and optimizer step.

    Needs `memory_args` and `limit` (a BatchLimit), which the mixin makes.
    """

    limit: BatchLimit

    def split_batch(self, inputs, start: int, stop: int) -> dict[str, Any]:
        """Samples `start` to before `stop` of a micro-batch. Override it where tensors have another layout."""
        return piece_of(inputs, start, stop)

    # ---- what the Trainer calls

    def get_batch_samples(self, *args, **kwargs):
        self._between_windows()
        self._window = Window()
        self._agree_on_limit()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self._recovers():
            return self._unrecovered_step(model, inputs, num_items_in_batch)
        window = self._window
        window.began = window.began or RandomState.now()
        micro = self._micro_batch(inputs, num_items_in_batch, len(window.started))
        window.started.append(micro)
        while True:
            try:
                for earlier in window.started[:-1]:  # done, unless the window has to start again
                    self._run(model, earlier, False)
                return self._run(model, micro, micro.synced)
            except Exception as error:
                found = self._recoverable(error)
                traceback.clear_frames(error.__traceback__)  # they hold the activations
            free_memory()
            self._smaller(model, found)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self._stage == "start":
            self._stage = "forward"
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if self._share != 1.0:
            loss, *rest = result if isinstance(result, tuple) else (result,)
            result = (loss * self._share, *rest) if rest else loss * self._share
        if model.training:
            self._near_peak = max(self._near_peak, self._memory.allocated())  # all activations are there
        self._stage = "backward"  # of a training step: what can fail from here on leaves parts of gradients
        return result

    def _clip_grad_norm(self, model):
        if not self._recovers():
            return super()._clip_grad_norm(model)
        first = next((weight.grad for weight in model.parameters() if weight.grad is not None), None)
        untouched = first is not None and first._version
        try:
            return super()._clip_grad_norm(model)
        except Exception as error:
            found = diagnose(error)
            if not found.smaller_batch_helps or first is None or first._version != untouched:
                raise
            traceback.clear_frames(error.__traceback__)
        free_memory()  # norms are computed before gradients are scaled
        norm = super()._clip_grad_norm(model)
        self._event("oom_recovered", stage="clipping", message=found.message)
        return norm

    def _prepare_for_training(self, *args, **kwargs):
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self._recovers() and not hasattr(self.optimizer.step, "unguarded"):
            inner = torch_optimizer(self)
            self._states_are_new = not inner.state
            survived, failed = self._optimizer_survived, self._optimizer_failed
            self.optimizer.step = guard(self.optimizer.step, inner, survived, failed)
            if self.args.world_size > 1:
                self.model.register_forward_pre_hook(self._forward_begins)
        return prepared

    def _forward_begins(self, *_) -> None:
        self._window.forward_began = True

    def _unrecovered_step(self, model, inputs, num_items):
        """A step that cannot be taken again: under an engine that shards, processes wait for each other all the time;
        an optimizer that steps in backward has changed weights. The run ends, and goes on from the last checkpoint."""
        self._stage = "start"
        try:
            return super().training_step(model, inputs, num_items)
        except Exception as error:
            found = diagnose(error)
            if found.kind is OomKind.NOT_MEMORY or not self.memory_args.oom_recovery or self.args.n_gpu > 1:
                raise
            traceback.clear_frames(error.__traceback__)
        micro = self._micro_batch(inputs, num_items, len(self._window.started))
        what = "optimizer_in_backward" if self._whole_model() else self.accelerator.distributed_type.value
        intact = self._whole_model() and self._stage != "backward"
        self._exhausted(self._stage, found, micro, f"{what} cannot take a step again", intact)

    # ---- one micro-batch

    def _recovers(self) -> bool:
        """In-step recovery is for one process and for DDP; engines that shard would wait for each other forever."""
        memory = self.memory_args
        steps_at_the_end = not memory.optimizer_in_backward
        return memory.oom_recovery and steps_at_the_end and self._whole_model() and self.args.n_gpu <= 1

    def _whole_model(self) -> bool:
        """Whether each process holds the whole model."""
        from accelerate.utils import DistributedType

        return not self.is_distributed_loading_by_transformers and self.accelerator.distributed_type in (
            DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU,
        )  # fmt: skip

    def _micro_batch(self, inputs, num_items, number: int) -> MicroBatch:
        rows, elements = rows_of(inputs), elements_of(inputs)
        size = self.limit.rows_at_once(rows, elements)
        synced = bool(self.accelerator.gradient_state.sync_gradients)
        return MicroBatch(inputs, num_items, rows, elements, size, synced, number)

    def _run(self, model, micro: MicroBatch, synced: bool):
        """Forward and backward of what is left of a micro-batch; the loss of all of it."""
        while micro.at < micro.rows:
            start, stop = micro.next_piece
            self._running, self._stage, self._piece_began = (micro, stop - start), "start", RandomState.now()
            piece = self.split_batch(micro.inputs, start, stop)
            self._share = self._share_of(micro, piece)
            try:
                with contextlib.nullcontext() if synced and stop == micro.rows else self._unsynced(model):
                    loss = self._step_of(model, piece, micro.num_items)
            finally:
                self._share = 1.0
            micro.ran(start, stop, loss)
        return micro.loss

    def _step_of(self, model, piece, num_items):
        if self._share == 0.0:  # none of its labels counts: a mean over nothing is no number, and times 0 neither
            piece["labels"] = piece["labels"].clamp(min=0)
        return super().training_step(model, piece, num_items)

    def _share_of(self, micro: MicroBatch, piece) -> float:
        """What a piece's loss counts for: 1 where losses are sums over the whole window's items, else its share of the
        micro-batch's items."""
        if rows_of(piece) == micro.rows or loss_is_a_sum(self, micro):
            return 1.0
        whole = loss_items(self, micro.inputs)
        return loss_items(self, piece) / whole if whole else rows_of(piece) / micro.rows

    def _unsynced(self, model):
        return self.accelerator.no_sync(model) if self.args.world_size > 1 else contextlib.nullcontext()

    # ---- after a failure

    def _recoverable(self, error: Exception) -> Diagnosis:
        """What the failure is; raised again unless smaller pieces help."""
        found = diagnose(error)
        if not found.helps_on(self.args.device):
            raise error
        micro, rows = self._running
        if self.args.world_size > 1 and self._stage == "backward" and micro.synced and micro.at + rows == micro.rows:
            self._end_together(found)
        return found

    def _smaller(self, model, found: Diagnosis) -> None:
        """Make the piece that failed smaller, and start the window again where gradients may have been changed."""
        micro, rows = self._running
        stage = "backward" if self._stage == "backward" else "forward"
        self._let_cut(micro, rows, stage, found)
        micro.cut_smaller(self.limit.lower(rows, micro.elements * rows // micro.rows))
        self._event(
            "oom_recovered", stage=stage, cause=found.cause, message=found.message, micro_batch_before=rows,
            micro_batch_after=micro.size, shapes=shapes_of(micro.inputs), dataset_indices=self._dataset_indices(micro),
        )  # fmt: skip
        if self._window.forward_began and hasattr(model, "require_forward_param_sync"):
            model.require_forward_param_sync = False  # DDP broadcasts buffers once a window: that is done
        if self._stage == "forward":
            self._piece_began.restore()
            return
        model.zero_grad()
        self._window.began.restore()
        for started in self._window.started:
            started.again()

    def _let_cut(self, micro: MicroBatch, rows: int, stage: str, found: Diagnosis) -> None:
        """End the run where a piece cannot be cut any more, and has been tried again after freeing."""
        if rows <= max(1, self.limit.fewest_rows):
            if micro.tried_again:
                self._exhausted(stage, found, micro)
            micro.tried_again = True
            return
        try:
            self.split_batch(micro.inputs, 0, 1)
        except InputError as error:
            self._exhausted(stage, found, micro, str(error))

    # ---- the optimizer

    def _optimizer_survived(self, messages: list[str]) -> None:
        one_by_one = use_less(torch_optimizer(self))
        self._event("oom_recovered", stage="optimizer", message=messages[0], retried=len(messages),
                    one_weight_at_a_time=one_by_one)  # fmt: skip

    def _optimizer_failed(self, error: BaseException, wrote: bool) -> None:
        found = diagnose(error)
        if found.kind is OomKind.NOT_MEMORY:
            return
        if self._states_are_new and self.state.global_step == 0 and not wrote:
            torch_optimizer(self).state.clear()  # half of them are there
        self._exhausted("optimizer", found, self._window.started[-1], intact=not wrote)
