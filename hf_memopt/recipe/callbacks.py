"""Callbacks of recipes while they train: the held-out loss, and that gradients reach everything trainable."""

import logging
import math

from tqdm import tqdm
from transformers import TrainerCallback

logger = logging.getLogger(__name__)


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
