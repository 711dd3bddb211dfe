"""State that a forward pass changes apart from gradients: random states, buffers, logged metrics, a user's numbers.

A user's own loss may keep state on the trainer: numbers are restored where a pass runs again, more is refused.
"""

import dis
import random
import types
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
import torch

from hf_memopt.trainer.step.known_code import is_known

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

# Private attributes that TRL 1.16's trainers append to in compute_loss: a repeated pass would count twice. Where one
# is renamed, its metrics count repeated passes; losses and gradients are not affected.
_TRL_METRICS = ("_metrics", "_total_train_tokens")
_MOST_COPIED = 2**26  # bytes of buffers that are copied; quantized checkpoints (GPTQ) keep their weights in buffers
_DEEPEST = 4  # levels of containers and objects that are looked into


@dataclass(frozen=True)
class RandomState:
    """States of the generators of Python, numpy and torch (the CPU's and that of this process's device).

    Attributes:
        index: of the device. torch's current device is set per thread: another thread would restore device 0.
    """

    python: Any
    numpy: Any
    torch: Any
    device: Any
    index: int | None

    @classmethod
    def now(cls) -> "RandomState":
        module = _device_module()
        device = index = None
        if module is not None:
            index = module.current_device() if hasattr(module, "current_device") else None
            device = module.get_rng_state() if index is None else module.get_rng_state(index)
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device, index)

    def restore(self) -> None:
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.device is not None:
            _device_module().set_rng_state(self.device, *([] if self.index is None else [self.index]))


def _device_module():
    """torch.cuda, torch.xpu or torch.mps; None on a CPU, or before CUDA is initialized."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda
    if torch.xpu.is_available():
        return torch.xpu
    return torch.mps if torch.backends.mps.is_available() else None


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
    def now(cls, trainer: "MemoryTrainer", buffers: bool = True) -> "StepState":
        """Args:
        buffers: copy buffers, too; an evaluation, which changes none, does without.
        """
        metrics = {name: _copied(getattr(trainer, name)) for name in _TRL_METRICS if hasattr(trainer, name)}
        metrics |= numbers(trainer)
        copies = trainer._runner.buffers.copies() if buffers else {}
        return cls(RandomState.now(), metrics, copies, trainer._runner.buffers.written())

    def restore(self, trainer: "MemoryTrainer") -> None:
        self.random.restore()
        trainer._runner.buffers.restore(self.buffers)
        for name in _TRL_METRICS:
            if name in self.metrics:
                setattr(trainer, name, _copied(self.metrics[name]))
        self.restore_numbers(trainer)

    def restore_numbers(self, trainer: "MemoryTrainer") -> None:
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

    def __init__(self, trainer: "MemoryTrainer", own: bool, copied: bool) -> None:
        """Args:
        own: the model or its loss is a user's own, which may change buffers or weights in any later step, too.
        copied: steps may run again, so buffers are copied before they do.
        """
        self._trainer = trainer
        self._own = own and copied
        self._noted = not copied
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
        weights = self._trainer.model.parameters() if self._own else ()
        return tuple(tensor._version for tensor in (*weights, *buffers))

    def changed_since(self, state: StepState) -> str:
        """The name of a buffer that differs from a state's; "" where none does."""
        if self._noted and not self._own:
            return next(iter(self._changing), "")
        if self._too_large:
            return "a quantized weight" if self.written() != state.written else ""
        return next(self._differing(state), "")

    def note_changed(self, state: StepState) -> str:
        """Note, after the first training pass, which buffers it has changed; the name of one, or ""."""
        if self._noted or self._own:
            return ""
        changed = self.changed_since(state)
        if changed and not self._too_large:
            self._changing = set(self._differing(state))
        self._noted = True
        return changed

    def _differing(self, state: StepState) -> Iterator[str]:
        return (name for name, buffer in self._watched() if not _equal(buffer, state.buffers.get(name)))

    @property
    def _too_large(self) -> bool:
        return sum(buffer.nbytes for _, buffer in self._watched()) > _MOST_COPIED

    def _watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._noted and not self._changing:
            return
        for name, buffer in self._trainer.model.named_buffers():
            # Rotary frequencies (dynamic and long RoPE) follow from the padded length, which chunks keep.
            if not name.endswith("inv_freq") and (not self._noted or name in self._changing):
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


def numbers(trainer: "MemoryTrainer") -> dict[str, Any]:
    """The numbers among the user's own attributes: counters and running means."""
    return {name: value for name, value in _own_attributes(trainer).items() if isinstance(value, bool | int | float)}


def fingerprint(trainer: "MemoryTrainer") -> dict[str, Any]:
    """Fingerprint the user's own attributes that are no numbers: a value that changes when they do."""
    counted = numbers(trainer)
    return {name: _print(value, _DEEPEST) for name, value in _own_attributes(trainer).items() if name not in counted}


def _own_attributes(trainer: "MemoryTrainer") -> dict[str, Any]:
    """The attributes that no method of a known class assigns."""
    stored = frozenset().union(*(_stored_names(kind) for kind in type(trainer).__mro__ if is_known(kind)))
    return {name: value for name, value in vars(trainer).items() if name not in stored}


@cache
def _stored_names(kind: type) -> frozenset[str]:
    """Attributes that a class's methods assign: read from their code, since there is no list of them."""
    names: set[str] = set()
    codes = [value.__code__ for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    while codes:
        code = codes.pop()
        names.update(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names)


def _print(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        # A sum as well: writes through `.data` leave the version as it is.
        wide = torch.float32 if value.device.type == "mps" else torch.float64
        summed = value.numel() and not value.is_complex()
        return id(value), value._version, float(value.detach().sum(dtype=wide)) if summed else 0.0
    if isinstance(value, torch.nn.Module):
        return [_print(tensor, 0) for tensor in (*value.parameters(), *value.buffers())]
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, str | bytes | bool | int | float | None):
        return value
    if depth == 0 or is_known(type(value)):
        return id(value)
    if isinstance(value, dict):
        return [(id(key), _print(inner, depth - 1)) for key, inner in value.items()]
    if hasattr(value, "__len__") and hasattr(value, "__iter__"):
        return [_print(inner, depth - 1) for inner in value]
    return {name: _print(inner, depth - 1) for name, inner in getattr(value, "__dict__", {}).items()}
