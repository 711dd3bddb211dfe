"""Optimizer steps that run out of memory: repeated where that is exact, else reported as partly done.

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

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.compatibility.rules import STEPS_IN_BACKWARD
from hf_memopt.oom.classify import diagnose, free_memory

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
    """Position and name of the arguments that an operator writes to.

    Read from `OpOverload._schema`, which is private (torch 2.13): nothing public describes aliasing.
    """
    named = enumerate(func._schema.arguments)
    return tuple((at, arg.name) for at, arg in named if arg.alias_info is not None and arg.alias_info.is_write)


@cache
def _makes(func) -> bool:
    """True if an operator's results are new memory, not views of its arguments."""
    if func is torch.ops.aten.lift_fresh.default:  # of torch.tensor(): declared a view, but of new memory
        return True
    return all(result.alias_info is None for result in func._schema.returns)


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
    step: Callable,
    optimizer,
    survived: Callable[[list[str]], None],
    failed: Callable[[BaseException, bool], None],
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


def torch_optimizer(trainer):
    """The torch optimizer inside accelerate's wrapper; None before the Trainer has made one."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def sees_writes(optimizer) -> bool:
    """True if all writes of an optimizer's step go through torch's dispatcher, where StepWatch sees them."""
    dispatched = type(optimizer).__module__.startswith(_DISPATCHED)
    return dispatched and not any(map(_is_compiled, _wrapped_functions(optimizer.step)))


def _wrapped_functions(function) -> Iterator[Callable]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_compiled(function) -> bool:
    """True if torch.compile returned a function. It sets this attribute (torch 2.13), as does torch._dynamo.disable,
    which sets a second one too."""
    marks = getattr(function, "__dict__", {})
    return "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable")


def steps_in_backward(optim) -> bool:
    """True if a TrainingArguments `optim` changes weights while backward runs, so that no step can be repeated."""
    return getattr(optim, "value", optim) in STEPS_IN_BACKWARD


def use_less(optimizer) -> bool:
    """Make an optimizer update one weight at a time (foreach=False), where it can; True if that changed anything."""
    changed = False
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused") and group["foreach"] is not False:
            group["foreach"] = False
            changed = True
    return changed
