"""State that a forward pass changes apart from gradients: random states, buffers, logged metrics, a user's numbers."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.trainer.step.own_state import numbers
from hf_memopt.trainer.step.random_state import RandomState

# Private attributes that TRL 1.16's trainers append to in compute_loss: a repeated pass would count twice. Where one
# is renamed, its metrics count repeated passes; losses and gradients are not affected.
_TRL_METRICS = ("_metrics", "_total_train_tokens")
_MOST_COPIED = 2**26  # bytes of buffers that are copied; quantized checkpoints (GPTQ) keep their weights in buffers


@dataclass(frozen=True)
class StepState:
    """Random states, buffers, metrics and numbers at one point of a step.

    Attributes:
        buffers: copies of the buffers that training may change, by name.
        written: how often each weight, and each buffer without a copy, was written to in place (`_version`).
    """

    random: RandomState
    metrics: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    written: tuple[int, ...]

    @classmethod
    def now(cls, trainer, buffers: bool = True) -> "StepState":
        """Args:
        buffers: copy buffers, too; an evaluation, which changes none, does without.
        """
        metrics = {name: _copied(getattr(trainer, name)) for name in _metric_names(trainer)}
        copies = trainer._runner.buffers.copies() if buffers else {}
        return cls(RandomState.now(), metrics, copies, trainer._runner.buffers.written())

    def restore(self, trainer) -> None:
        self.random.restore()
        trainer._runner.buffers.restore(self.buffers)
        for name in _TRL_METRICS:
            if name in self.metrics:
                setattr(trainer, name, _copied(self.metrics[name]))
        self.restore_numbers(trainer)

    def restore_numbers(self, trainer) -> None:
        """Restore the numbers of a user's own loss alone."""
        for name in set(numbers(trainer)) - set(self.metrics):
            delattr(trainer, name)
        for name, value in self.metrics.items():
            if name not in _TRL_METRICS:
                setattr(trainer, name, value)


class Buffers:
    """The buffers of a model that may change in training: all of them, until a step has shown which do.

    A module that keeps state (batch statistics, power iterations, a queue) is recognized by that, whatever its class.
    """

    def __init__(self, trainer, own: bool, copied: bool) -> None:
        """Args:
        own: the model or its loss is a user's own, which may change buffers or weights in any later step, too.
        copied: steps may run again, so buffers are copied before they do.
        """
        self._trainer = trainer
        self._own = own and copied
        self._settled = not copied
        self._changing: set[str] = set()

    def copies(self) -> dict[str, torch.Tensor]:
        return {} if self._too_large else {name: buffer.detach().clone() for name, buffer in self._watched()}

    def restore(self, copies: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._watched() if copies else ():
                if name in copies and not _equal(buffer, copies[name]):
                    buffer.copy_(copies[name])

    def written(self) -> tuple[int, ...]:
        buffers = [buffer for _, buffer in self._watched()] if self._too_large else []
        weights = self._model.parameters() if self._own else ()
        return tuple(tensor._version for tensor in (*weights, *buffers))

    def changed_since(self, state: StepState) -> str:
        """The name of a buffer that differs from a state's; "" where none does."""
        if self._settled and not self._own:
            return next(iter(self._changing), "")
        if self._too_large:
            return "a quantized weight" if self.written() != state.written else ""
        return next(self._differing(state), "")

    def settle(self, state: StepState) -> str:
        """Note, after the first training pass, which buffers it has changed; the name of one, or ""."""
        if self._settled or self._own:
            return ""
        changed = self.changed_since(state)
        if changed and not self._too_large:
            self._changing = set(self._differing(state))
        self._settled = True
        return changed

    def _differing(self, state: StepState) -> Iterator[str]:
        return (name for name, buffer in self._watched() if not _equal(buffer, state.buffers.get(name)))

    @property
    def _model(self) -> torch.nn.Module:
        return self._trainer.model

    @property
    def _too_large(self) -> bool:
        return sum(buffer.nbytes for _, buffer in self._watched()) > _MOST_COPIED

    def _watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._settled and not self._changing:
            return
        for name, buffer in self._model.named_buffers():
            # Rotary frequencies (dynamic and long RoPE) follow from the padded length, which chunks keep.
            if not name.endswith("inv_freq") and (not self._settled or name in self._changing):
                yield name, buffer


def _copied(value: Any) -> Any:
    """A copy of metrics, which are numbers in lists in mappings. deepcopy takes a hundred times as long, and an
    evaluation copies all that it has collected with every batch."""
    if isinstance(value, dict):
        result = copy(value)  # with the default of a defaultdict
        result.update({name: _copied(inner) for name, inner in value.items()})
        return result
    return list(value) if isinstance(value, list) else value


def _equal(buffer: torch.Tensor, copy: torch.Tensor | None) -> bool:
    return copy is not None and buffer.shape == copy.shape and torch.equal(buffer, copy)


def _metric_names(trainer) -> list[str]:
    """TRL's metrics, and numbers that a user's own loss keeps."""
    return [name for name in _TRL_METRICS if hasattr(trainer, name)] + list(numbers(trainer))
