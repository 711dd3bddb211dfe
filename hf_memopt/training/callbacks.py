"""What a recipe watches while it trains: the held-out loss, and that gradients reach everything trainable."""

import logging
import math

from tqdm import tqdm
from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class HeldOutLoss(TrainerCallback):
    """Collects the held-out loss by step and prints each as it comes."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        loss = (metrics or {}).get("eval_loss")
        if loss is None:
            return
        self.by_step[state.global_step] = loss
        if state.is_world_process_zero:
            tqdm.write(
                f"step {state.global_step}: held-out loss {loss:.4f} (perplexity {math.exp(min(loss, 50)):.1f})"
            )


class HostPeak(TrainerCallback):
    """Measures the peak of what the CPU's allocator holds, over the first optimizer steps.

    Follows every real storage for two steps; the first makes the optimizer's states, the second has them throughout.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._ledger = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        from hf_memopt.estimator.ledger import Ledger

        self._ledger = Ledger(fake=False)
        for tensor in (*model.parameters(), *model.buffers()):
            self._ledger.add(tensor)
        self._ledger.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if self._ledger is not None and (state.global_step >= 2 or state.global_step >= state.max_steps):
            self._ledger.__exit__(None, None, None)
            self.bytes = max(peak.total for peak in self._ledger.peaks.values())
            self._ledger = None


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
                len(missing), ", ".join(missing[:5]),
            )  # fmt: skip
