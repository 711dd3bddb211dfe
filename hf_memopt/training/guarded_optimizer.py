"""An optimizer step that survives running out of memory half-way.

An optimizer changes its states and weights operator by operator, so that neither going on nor starting again after an
exception in its midst gives the right weights. Here every operator that finds no memory is tried once more after what
is no longer needed was freed: an operator allocates before it writes, so that nothing is done twice.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps

from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.training.oom import diagnose, free_memory


class RetryOperators(TorchDispatchMode):
    """Within it, an operator that finds no memory is tried again after freeing.

    Attributes:
        retried: messages of the failures that the second try survived.
        wrote: something that was there before has been changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.retried: list[str] = []
        self.wrote = False
        self._made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            found = diagnose(error)
            if not found.smaller_batch_helps:
                raise
            message = found.message
        else:
            self._note(func, args, out)
            return out
        free_memory()
        out = func(*args, **kwargs)
        self.retried.append(message)
        self._note(func, args, out)
        return out

    def _note(self, func, args, out) -> None:
        if func._schema.is_mutable:
            target = args[0] if args else None
            targets = target if isinstance(target, list | tuple) else [target]
            self.wrote = self.wrote or any(_key(part) not in self._made for part in targets)
        else:
            made = out if isinstance(out, list | tuple) else [out]
            self._made.update(filter(None, map(_key, made)))


def _key(tensor) -> int | None:
    storage = getattr(tensor, "untyped_storage", None)
    return storage()._cdata if storage is not None else None


def guard(step: Callable, optimizer, survived: Callable[[list[str]], None],
          failed: Callable[[BaseException, bool], None]):  # fmt: skip
    """A step function that retries operators.

    Args:
        step: the optimizer's.
        optimizer: torch's own.
        survived: called with the messages of failures that were survived.
        failed: called with the exception and whether weights or states were already changed; it may raise.
    """

    @wraps(step)  # schedulers look for marks on it
    def guarded(*args, **kwargs):
        retry = RetryOperators()
        try:
            with nullcontext() if allocates_nothing(optimizer) else retry:
                result = step(*args, **kwargs)
        except Exception as error:
            failed(error, retry.wrote)
            raise
        if retry.retried:
            survived(retry.retried)
        return result

    guarded.unguarded = step
    return guarded


def torch_optimizer(trainer):
    """torch's own optimizer, within accelerate's; None before there is one."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def allocates_nothing(optimizer) -> bool:
    """Whether a step works in place altogether: torch's fused optimizers, once their states are there."""
    return bool(optimizer.state) and all(group.get("fused") for group in optimizer.param_groups)


def use_less(optimizer) -> bool:
    """Have an optimizer work through one weight after another, not all at once, where it can; True if changed."""
    changed = False
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused") and group["foreach"] is not False:
            group["foreach"] = False
            changed = True
    return changed
