"""Gradient clipping and optimizer steps that run out of memory: repeated where that is exact, else partly done.

An optimizer updates states and weights operator by operator. After an exception in the middle, neither continuing nor
repeating the step gives the right weights. Two things can be repeated exactly:

* an operator that only makes new tensors, or that writes the same values again (a copy);
* the whole step, as long as no tensor from before it was written.

Any other failure ends the run. The caller learns whether the step had written anything, and saves the weights only if
it had not, so that no checkpoint holds half an update.
"""

import traceback
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose, free_memory
from hf_memopt.trainer.step.known_code import defined_by_user
from hf_memopt.trainer.step.recoverability import changes_weights_in_backward, holds_whole_model
from hf_memopt.trainer.step.runner import StepRunner

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

# Run twice, they write the same values, however far the first run came.
_IDEMPOTENT = frozenset({"aten::copy_", "aten::_foreach_copy_", "aten::fill_", "aten::zero_", "aten::_foreach_zero_"})
# Optimizers of these packages write only through torch's dispatcher, fused and 8-bit kernels included (torch 2.13,
# bitsandbytes 0.50). torchao's kernels are compiled, and others may use Triton or ctypes, which it does not see.
_DISPATCHED = ("torch.optim", "transformers.optimization", "bitsandbytes.optim", "hf_memopt.levers")


class StepWatch(TorchDispatchMode):
    """Watches every operator of an optimizer step and repeats those that can be repeated.

    Tensors' `_version` would not do: fused kernels and those of bitsandbytes write without increasing it.

    Attributes:
        repeated: messages of the failures after which an operator was repeated.
        wrote: an operator that writes to a tensor from before the step has begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repeated: list[str] = []
        self.wrote = False
        self._made: set[int] = set()  # storages allocated within the step

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled under this mode; torchao's step refuses to run otherwise."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.wrote:  # before it runs: one that fails may have begun
            written = (args[at] if at < len(args) else kwargs.get(name) for at, name in _written(func))
            self.wrote = any(_storage(tensor) not in self._made for tensor in _tensors(written))
        failure = None
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            failure = diagnose(error)
            if not (failure.smaller_batch_helps and _can_repeat(func)):
                raise
        if failure is not None:
            free_memory()
            out = func(*args, **kwargs)
            self.repeated.append(failure.message)
        if not self.wrote and _makes(func):
            self._made.update(map(_storage, _tensors(out)))
        return out


@cache
def _written(func) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to.

    Read from `OpOverload._schema`, which is private (torch 2.13): nothing public describes aliasing.
    """
    named = enumerate(func._schema.arguments)
    return tuple((at, arg.name) for at, arg in named if arg.alias_info is not None and arg.alias_info.is_write)


@cache
def _makes(func) -> bool:
    """True if an operator's results are new memory, not views of its arguments."""
    lifts = func is torch.ops.aten.lift_fresh.default  # of torch.tensor(): declared a view, but of new memory
    return lifts or all(result.alias_info is None for result in func._schema.returns)


@cache
def _can_repeat(func) -> bool:
    """True if running an operator again after a failure has the same result as running it once."""
    if func._schema.is_mutable:
        return func._schema.name in _IDEMPOTENT
    return func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags


def _tensors(nested) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, list | tuple | Iterator):
        for part in nested:
            yield from _tensors(part)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Undo:
    """Restores an optimizer's Python state: the dict of states, step counts, settings of groups.

    Tensors are not copied; it is for a step that wrote to none.
    """

    def __init__(self, optimizer) -> None:
        state = {} if optimizer is None else optimizer.state
        groups = [] if optimizer is None else optimizer.param_groups
        self._copies = [(original, dict(original)) for original in (state, *state.values(), *groups)]

    def __call__(self) -> None:
        for original, copy in self._copies:
            original.clear()
            original.update(copy)


def guard(
    step: Callable, optimizer, survived: Callable[[list[str]], None], failed: Callable[[BaseException, bool], None]
):
    """Wrap an optimizer's step so that it repeats what can be repeated exactly.

    Args:
        step: the optimizer's `step`.
        optimizer: the torch.optim.Optimizer.
        survived: called with the messages of the failures that the step recovered from.
        failed: called with the exception and whether weights or states may have changed; it may raise. Where they have
            not, the optimizer is as it was before the step.
    """

    @wraps(step)  # torch's schedulers mark `step` by an attribute and look for it (_wrapped_by_lr_sched)
    def guarded(*args, **kwargs):
        messages: list[str] = []
        dispatched = sees_writes(optimizer)
        for attempt in ("all weights at once", "one by one"):
            watch, undo = StepWatch(), _Undo(optimizer if dispatched else None)
            try:
                with watch:
                    result = step(*args, **kwargs)
                break
            except Exception as error:
                wrote = watch.wrote or not dispatched
                failure = diagnose(error)
                if not wrote:
                    undo()
                if wrote or not failure.smaller_batch_helps or attempt == "one by one":
                    failed(error, wrote)
                    raise
                messages += [*watch.repeated, failure.message]
                traceback.clear_frames(error.__traceback__)  # the frames hold temporaries
            free_memory()
            use_less(optimizer)
        messages += watch.repeated
        if messages:
            survived(messages)
        return result

    guarded.unguarded = step
    return guarded


def torch_optimizer(trainer: "MemoryTrainer"):
    """The torch optimizer inside accelerate's wrapper; None before the Trainer has made one."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def sees_writes(optimizer) -> bool:
    """True if all writes of an optimizer's step go through torch's dispatcher, where StepWatch sees them."""
    if not type(optimizer).__module__.startswith(_DISPATCHED):
        return False
    function = optimizer.step
    while function is not None:
        # torch.compile sets the first attribute (torch 2.13); torch._dynamo.disable sets both.
        marks = getattr(function, "__dict__", {})
        if "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def use_less(optimizer) -> bool:
    """Make an optimizer update one weight at a time (foreach=False), where it can; True if that changed anything."""
    changed = False
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused") and group["foreach"] is not False:
            group["foreach"] = False
            changed = True
    return changed


class UpdateRecovery:
    """Recovers what runs after the last backward of a window."""

    def __init__(self, trainer: "MemoryTrainer", runner: StepRunner) -> None:
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

        def survived(messages: list[str]) -> None:
            trainer._event(
                "oom_recovered",
                stage="optimizer",
                message=messages[0],
                retried=len(messages),
                one_weight_at_a_time=use_less(inner),
            )

        def failed(error: BaseException, wrote: bool) -> None:
            diagnosis = diagnose(error)
            if diagnosis.kind is not OomKind.NOT_MEMORY:
                why = "its weights are between two steps" if wrote else "no smaller micro-batch helps an optimizer"
                self._end_run("optimizer", diagnosis, why, intact=not wrote)

        trainer.optimizer.step = guard(trainer.optimizer.step, inner, survived, failed)

    def _end_run(self, stage: str, diagnosis: Diagnosis, why: str, intact: bool = True) -> None:
        self._trainer._ending.end_run(stage, diagnosis, self._runner.window.started[-1], why, intact)
