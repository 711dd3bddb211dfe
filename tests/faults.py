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

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.phase is not None and not func._schema.is_mutable and not func.is_view:
            number = self.counts[self.phase] = self.counts.get(self.phase, 0) + 1
            if number in self.at.get(self.phase, ()):
                self.hits.append((self.phase, number))
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. ({func})")
        return func(*args, **(kwargs or {}))

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
