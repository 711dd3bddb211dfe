"""What a forward pass changes apart from gradients: random states, and metrics that losses log."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hf_memopt.trainer.random_state import RandomState

# Private attributes that TRL 1.16's trainers append to in compute_loss: a repeated pass would count twice. Where one
# is renamed, its metrics count repeated passes; losses and gradients are not affected.
_TRL_METRICS = ("_metrics", "_total_train_tokens")

# Sums that the Trainer (transformers 5.23) adds to after training_step: restoring these would lose earlier
# micro-batches.
_TRAINER_SUMS = {"current_flos", "_total_loss_scalar"}


@dataclass(frozen=True)
class StepState:
    """Random states and logged metrics at one point of a step."""

    random: RandomState
    metrics: dict[str, Any]

    @classmethod
    def now(cls, trainer) -> "StepState":
        return cls(RandomState.now(), {name: deepcopy(getattr(trainer, name)) for name in _metric_names(trainer)})

    def restore(self, trainer) -> None:
        self.random.restore()
        for name in set(_metric_names(trainer)) - set(self.metrics):
            delattr(trainer, name)
        for name, value in self.metrics.items():
            setattr(trainer, name, deepcopy(value))


def _metric_names(trainer) -> list[str]:
    """TRL's metrics, and float attributes, where a user's own loss may keep a running mean."""
    numbers = [name for name, value in vars(trainer).items() if isinstance(value, float) and name not in _TRAINER_SUMS]
    return [name for name in _TRL_METRICS if hasattr(trainer, name)] + numbers
