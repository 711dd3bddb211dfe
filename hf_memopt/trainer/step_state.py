"""What a forward pass changes beside gradients: random generators, and the metrics that TRL's losses log."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hf_memopt.trainer.random_state import RandomState

# TRL 1.16's trainers append to them in compute_loss; a pass that runs again would count twice.
_LOGGED = ("_metrics", "_total_train_tokens")

# The Trainer's own sums over micro-batches, which it adds to when training_step has returned.
_OF_THE_LOOP = {"current_flos", "_total_loss_scalar"}


@dataclass(frozen=True)
class StepState:
    """A moment of a step to come back to."""

    random: RandomState
    logged: dict[str, Any]

    @classmethod
    def now(cls, trainer) -> "StepState":
        return cls(RandomState.now(), {name: deepcopy(getattr(trainer, name)) for name in _logged(trainer)})

    def restore(self, trainer) -> None:
        self.random.restore()
        for name in set(_logged(trainer)) - set(self.logged):
            delattr(trainer, name)
        for name, value in self.logged.items():
            setattr(trainer, name, deepcopy(value))


def _logged(trainer) -> list[str]:
    """Also numbers that a loss of the user's own may keep, such as a running mean."""
    numbers = [name for name, value in vars(trainer).items() if isinstance(value, float) and name not in _OF_THE_LOOP]
    return [name for name in _LOGGED if hasattr(trainer, name)] + numbers
