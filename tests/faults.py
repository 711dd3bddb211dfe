"""Running out of memory on purpose: a dispatch mode that raises at chosen allocations, on tensors with real bytes."""

from functools import wraps

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Strikes(TorchDispatchMode):
    """Raises torch.OutOfMemoryError at chosen allocations, instead of the operator that would have made them.

    Args:
        at: phase -> numbers of the allocations in that phase, counted over the whole run, that fail.
    """

    def __init__(self, at: dict[str, set[int]] | None = None):
        super().__init__()
        self.at = at or {}
        self.phase = None
        self.counts: dict[str, int] = {}
        self.hits: list[tuple[str, int]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            self.phase is not None
            and not func._schema.is_mutable
            and not func.is_view
            and func.namespace != "profiler"
        ):
            number = self.counts[self.phase] = self.counts.get(self.phase, 0) + 1
            if number in self.at.get(self.phase, ()):
                self.hits.append((self.phase, number))
                self.fail(func)
        return func(*args, **(kwargs or {}))

    def fail(self, func) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. ({func})")

    def during(self, phase: str, function):
        """The function, with its allocations counted for a phase."""

        @wraps(function)
        def counted(*args, **kwargs):
            before, self.phase = self.phase, "eval" if self.phase == "eval" else phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        return counted


class StrikesMidway(Strikes):
    """Counts every operator but views, those that write included, and lets some of them write before they fail.

    Args:
        manner: an operator fails "before" it runs, "midway" (of a list, the first tensor was updated) or "after".
        times: failures in a row; the second one hits the operator's or the step's repetition.
    """

    def __init__(self, number: int, manner: str, phase: str = "optimizer", times: int = 1):
        super().__init__({phase: set(range(number, number + times))})
        self.manner = manner

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.phase is None or func.is_view or func.namespace not in ("aten", "bitsandbytes"):
            return func(*args, **(kwargs or {}))
        number = self.counts[self.phase] = self.counts.get(self.phase, 0) + 1
        if number not in self.at.get(self.phase, ()):
            return func(*args, **(kwargs or {}))
        self.hits.append((self.phase, number))
        if self.manner == "midway":
            args = tuple(arg[:1] if isinstance(arg, list | tuple) else arg for arg in args)
        if self.manner != "before" and func._schema.is_mutable:
            func(*args, **(kwargs or {}))
        self.fail(func)


def struck(trainer, strikes: Strikes):
    """Have a trainer's phases counted: forward, backward, clipping and optimizer step, evaluation, saving."""
    trainer.model.forward = strikes.during("forward", trainer.model.forward)
    trainer.accelerator.backward = strikes.during("backward", trainer.accelerator.backward)
    trainer.accelerator.clip_grad_norm_ = strikes.during("clipping", trainer.accelerator.clip_grad_norm_)
    trainer.prediction_step = strikes.during("eval", trainer.prediction_step)
    trainer._save_optimizer_and_scheduler = strikes.during("save", trainer._save_optimizer_and_scheduler)
    create = trainer.create_optimizer

    def create_optimizer(*args, **kwargs):
        optimizer = create(*args, **kwargs)
        if not hasattr(optimizer, "struck"):
            optimizer.step = strikes.during("optimizer", optimizer.step)
            optimizer.struck = True
        return optimizer

    trainer.create_optimizer = create_optimizer
    return trainer
