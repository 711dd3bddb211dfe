"""The metrics of TRL's trainers, which gather them over processes in every forward pass (trl 1.16, compute_loss).

A process that runs a micro-batch again, in chunks, has more forward passes than the others, which would wait for it.
So each process keeps the metrics of its own samples while a step runs, and they are brought together after its last
micro-batch: a mean over processes of what each would have logged.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

from hf_memopt.presets.trl_configs import trl_trainer

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

# Whose losses gather nothing else; KTO's compares with a mean over all processes.
_TRAINERS = ("SFTTrainer", "DPOTrainer", "RewardTrainer")


def gathers_metrics_alone(kind: type) -> bool:
    """True if one of TRL's trainers gathers metrics and nothing that its loss depends on."""
    return kind.__name__ in _TRAINERS


class ProcessMetrics:
    """Metrics of one process's samples, until the optimizer step is done."""

    def __init__(self, trainer: "MemoryTrainer") -> None:
        kind = trl_trainer(trainer)
        self._trainer = trainer
        self._gathers = kind is not None and gathers_metrics_alone(kind) and trainer.args.world_size > 1
        self._active = False
        self._lengths: dict[str, int] = {}
        self._tokens = 0

    def begin_step(self) -> None:
        """Note what has been gathered so far; where nothing runs again, the trainer keeps gathering by itself."""
        self._active = self._gathers and self._trainer._runner.recovers
        if self._active:
            self._lengths = {name: len(values) for name, values in self._kept.items()}
            self._tokens = self._trainer._total_train_tokens

    @contextlib.contextmanager
    def kept_apart(self) -> Iterator[None]:
        """In here the trainer gathers nothing."""
        if not self._active:
            yield
            return
        accelerator = self._trainer.accelerator
        with (
            mock.patch.object(accelerator, "gather", _own),
            mock.patch.object(accelerator, "gather_for_metrics", _own),
        ):
            yield

    def bring_together(self) -> None:
        """Gather the step's metrics, once every process has run its last micro-batch."""
        if not (self._active and self._trainer.accelerator.sync_gradients):
            return
        from accelerate.utils import gather_object

        new = {name: values[self._lengths.get(name, 0) :] for name, values in self._kept.items()}
        own = {name: sum(values) / len(values) for name, values in new.items() if values}
        every = gather_object([(own, self._trainer._total_train_tokens - self._tokens)])
        for name in own:
            means = [metrics[name] for metrics, _ in every if name in metrics]
            self._kept[name][self._lengths.get(name, 0) :] = [sum(means) / len(means)]
        self._trainer._total_train_tokens = self._tokens + sum(tokens for _, tokens in every)
        self._kept["num_tokens"] = [self._trainer._total_train_tokens]

    @property
    def _kept(self) -> dict[str, list[float]]:
        return self._trainer._metrics["train"]


def _own(tensor, *_, **__):
    return tensor
