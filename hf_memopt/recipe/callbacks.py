"""Callbacks of recipes while they train: losses in lines, and that gradients reach everything trainable."""

import logging
import math

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

logger = logging.getLogger(__name__)

# Figures of a line, in order, as the Trainer and TRL log them. All others are in trainer_state.json and at trackers.
_SHOWN = {
    "loss": "loss {:.4f}",
    "reward": "reward {:.3f}",
    "rewards/accuracies": "reward accuracy {:.2f}",
    "learning_rate": "learning rate {:.2g}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


def print_in_lines(trainer, most: int | None = None) -> None:
    """Print what the trainer logs in short lines, where it would print dicts of every figure.

    Args:
        most: lines of the whole run; None for a line of each log.
    """
    bar, printer = trainer.pop_callback(ProgressCallback), trainer.pop_callback(PrinterCallback)
    if bar is not None:
        trainer.add_callback(_Bar())
    if bar is not None or printer is not None:  # a notebook has a table of its own
        trainer.add_callback(TrainingLines(most))


class _Bar(ProgressCallback):
    """transformers' progress bar alone."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


class TrainingLines(TrainerCallback):
    """Prints the loss, and what belongs to it, as it is logged.

    Args:
        most: lines, at most, evenly spaced over the run; None for a line of each log.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most, self._next = most, 0.0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if "train_runtime" in logs:
            tqdm.write(f"trained {state.global_step} steps in {logs['train_runtime']:.0f} s")
        elif "loss" in logs and (state.global_step >= self._next or state.global_step == state.max_steps):
            self._next = state.global_step + (state.max_steps / self._most if self._most else 0)
            figures = ", ".join(text.format(logs[name]) for name, text in _SHOWN.items() if name in logs)
            tqdm.write(f"step {state.global_step}/{state.max_steps}: {figures}")


class HeldOutLoss(TrainerCallback):
    """Collects the held-out loss by step and prints each as it comes.

    Args:
        perplexity: the loss is a mean over tokens, whose perplexity says something.
    """

    def __init__(self, perplexity: bool = True) -> None:
        self.by_step: dict[int, float] = {}
        self._perplexity = perplexity

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        loss = (metrics or {}).get("eval_loss")
        if loss is None:
            return
        self.by_step[state.global_step] = loss
        if state.is_world_process_zero:
            perplexity = f" (perplexity {math.exp(min(loss, 50)):.1f})" if self._perplexity else ""
            tqdm.write(f"step {state.global_step}: held-out loss {loss:.4f}{perplexity}")


class GradientCheck(TrainerCallback):
    """Names the trainable parameters that the first backward pass left without a gradient.

    Adapters behind reentrant checkpointing train nothing and say nothing. Under DeepSpeed gradients live in its own
    buffers and cannot be asked.
    """

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step > 0 or model is None or args.deepspeed_plugin is not None:
            return
        missing = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
        if missing:
            logger.warning(
                "%d trainable parameters got no gradient and will not learn, the first: %s",
                len(missing),
                ", ".join(missing[:5]),
            )
