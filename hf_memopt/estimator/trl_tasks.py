"""The tasks of TRL's trainers: their classes, a row of their data, and what beside the model they keep."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_memopt.presets.trl_configs import trl_class

WORD, END = "a", "<eos>"


def _text(tokens: int) -> str:
    """A text of so many tokens, with the end that TRL adds to it."""
    return " ".join([WORD] * (tokens - 1))


def _pair(length: int) -> dict[str, Any]:
    """The shortest prompt: the head computes logits of the answers' tokens alone."""
    return {"prompt": WORD + " ", "chosen": _text(length - 1), "rejected": _text(max(2, length - 2))}


def _prompt(length: int) -> dict[str, Any]:
    return {"prompt": " ".join([WORD] * length)}


def unscored(completions, **_) -> list[float]:
    """A reward function, which is not called."""
    return [0.0] * len(completions)


@dataclass(frozen=True)
class TrlTask:
    """A task that TRL has a trainer for.

    Attributes:
        trainer, config: names of TRL's classes.
        model: the task of tasks.TASKS whose model it trains.
        row: makes a row of so many tokens a sequence.
        reference: it keeps a reference model, unless there are adapters or its part is precomputed.
        generates: it generates completions, and makes its reference model itself, unless beta is 0.
    """

    trainer: str
    config: str
    row: Callable[[int], dict[str, Any]]
    model: str = "causal-lm"
    reference: bool = False
    generates: bool = False

    @property
    def config_class(self) -> type:
        """TRL's class of arguments.

        Raises:
            InputError: TRL is not installed.
        """
        return trl_class(self.config)


TRL_TASKS = {
    "sft": TrlTask("SFTTrainer", "SFTConfig", lambda length: {"text": _text(length)}),
    "dpo": TrlTask("DPOTrainer", "DPOConfig", _pair, reference=True),
    "kto": TrlTask(
        "KTOTrainer",
        "KTOConfig",
        lambda length: {"prompt": WORD + " ", "completion": _text(length - 1)},
        reference=True,
    ),
    "reward": TrlTask("RewardTrainer", "RewardConfig", _pair, model="sequence-classification"),
    "grpo": TrlTask("GRPOTrainer", "GRPOConfig", _prompt, generates=True),
    "rloo": TrlTask("RLOOTrainer", "RLOOConfig", _prompt, generates=True),
}


def model_task(task: str) -> str:
    """The task of tasks.TASKS whose model a task trains."""
    return TRL_TASKS[task].model if task in TRL_TASKS else task
