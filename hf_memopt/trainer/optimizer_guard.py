"""An optimizer step that runs out of memory: repeated where that is exact, otherwise known to be half done.

An optimizer changes states and weights operator by operator. After an exception in the middle of that, neither
continuing nor starting again gives the right weights. Two things can be repeated without doing anything twice:

* an operator that only makes new tensors, or whose second run writes the same values as its first (a copy);
* the whole step, as long as nothing that existed before it was written.

Every other failure ends the run. The caller learns whether the step had written anything, and saves the weights only
if it had not: "half a step" is in no checkpoint.
"""

import traceback
from collections.abc import Callable, Iterator
from functools import cache, wraps

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.compatibility.rules import STEPS_IN_BACKWARD
from hf_memopt.oom.classify import diagnose, free_memory

# Their second run writes the same values, however far the first one came.
_SAME_TWICE = frozenset({"aten::copy_", "aten::_foreach_copy_", "aten::fill_", "aten::zero_", "aten::_foreach_zero_"})
# Optimizers of these packages write through torch's dispatcher alone, fused and 8-bit kernels included. torchao's
# kernels are compiled, and what others do (Triton, ctypes, attributes of their own) cannot be known.
_SEEN = ("torch.optim", "transformers.optimization", "bitsandbytes.optim", "hf_memopt.levers")


class StepWatch(TorchDispatchMode):
    """Sees every operator of an optimizer step and repeats those that can be repeated.

    `_version` counters could not say what was written: fused kernels and bitsandbytes' leave them as they are.

    Attributes:
        repeated: messages of the failures after which an operator was repeated.
        wrote: an operator that writes to a tensor from before the step was at least begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repeated: list[str] = []
        self.wrote = False
        self._made: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work as it does without a mode; torchao's step refuses to run uncompiled."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._note_writes(func, args, kwargs)  # before it runs: one that fails may have begun
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            failure = diagnose(error)
            if not (failure.smaller_batch_helps and _can_repeat(func)):
                raise
        else:
            self._note_made(func, out)
            return out
        free_memory()
        out = func(*args, **kwargs)
        self.repeated.append(failure.message)
        self._note_made(func, out)
        return out

    def _note_writes(self, func, args, kwargs) -> None:
        if not self.wrote:
            written = (args[at] if at < len(args) else kwargs.get(name) for at, name in _written(func))
            self.wrote = any(_storage(tensor) not in self._made for tensor in _tensors(written))

    def _note_made(self, func, out) -> None:
        if not self.wrote and _makes(func):
            self._made.update(map(_storage, _tensors(out)))


@cache
def _written(func) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to."""
    named = enumerate(func._schema.arguments)
    return tuple((at, arg.name) for at, arg in named if arg.alias_info is not None and arg.alias_info.is_write)


@cache
def _makes(func) -> bool:
    """Whether an operator's results are memory of their own, not views of its arguments."""
    if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(): declared a view, of what only it has
        return True
    return all(result.alias_info is None for result in func._schema.returns)


@cache
def _can_repeat(func) -> bool:
    """Whether a second run after a failure leaves what one run would have left."""
    if func._schema.is_mutable:
        return func._schema.name in _SAME_TWICE
    return func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags


def _tensors(held) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, list | tuple | Iterator):
        for part in held:
            yield from _tensors(part)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Undo:
    """Puts back what Python holds of an optimizer: which states there are, step counts, a group's settings.

    Tensors are not copied; it is for a step that wrote to none.
    """

    def __init__(self, optimizer) -> None:
        state = {} if optimizer is None else optimizer.state
        groups = [] if optimizer is None else optimizer.param_groups
        self._held = [(one, dict(one)) for one in (state, *state.values(), *groups)]

    def __call__(self) -> None:
        for one, before in self._held:
            one.clear()
            one.update(before)


def guard(
    step: Callable,
    optimizer,
    survived: Callable[[list[str]], None],
    failed: Callable[[BaseException, bool], None],
):
    """A step function that repeats what can be repeated exactly.

    Args:
        step: the optimizer's.
        optimizer: torch's own.
        survived: called with the messages of failures that were survived.
        failed: called with the exception and whether weights or states may have been changed; it may raise. Where they
            were not, the optimizer is what it was before the step.
    """

    @wraps(step)  # schedulers look for marks on it
    def guarded(*args, **kwargs):
        messages: list[str] = []
        seen = sees_writes(optimizer)
        for attempt in ("all weights at once", "one by one"):
            watch, undo = StepWatch(), _Undo(optimizer if seen else None)
            try:
                with watch:
                    result = step(*args, **kwargs)
                break
            except Exception as error:
                wrote = watch.wrote or not seen
                failure = diagnose(error)
                if not wrote:
                    undo()
                if wrote or not failure.smaller_batch_helps or attempt == "one by one":
                    failed(error, wrote)
                    raise
                messages += [*watch.repeated, failure.message]
                traceback.clear_frames(error.__traceback__)  # they hold temporaries
            free_memory()
            use_less(optimizer)
        messages += watch.repeated
        if messages:
            survived(messages)
        return result

    guarded.unguarded = step
    return guarded


def torch_optimizer(trainer):
    """torch's own optimizer, within accelerate's; None before there is one."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def sees_writes(optimizer) -> bool:
    """Whether every write of an optimizer's step passes through torch's dispatcher, where StepWatch sees it."""
    known = type(optimizer).__module__.startswith(_SEEN)
    return known and not any(map(_is_compiled, _wrapped_functions(optimizer.step)))


def _wrapped_functions(function) -> Iterator[Callable]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_compiled(function) -> bool:
    """torch.compile marks what it returns; torch._dynamo.disable does so too, and adds a mark of its own."""
    marks = getattr(function, "__dict__", {})
    return "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable")


def steps_in_backward(optim) -> bool:
    """Whether a TrainingArguments `optim` changes weights while backward runs, so that no step can be taken again."""
    return getattr(optim, "value", optim) in STEPS_IN_BACKWARD


def use_less(optimizer) -> bool:
    """Have an optimizer work through one weight after another, not all at once, where it can; True if changed."""
    changed = False
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused") and group["foreach"] is not False:
            group["foreach"] = False
            changed = True
    return changed
