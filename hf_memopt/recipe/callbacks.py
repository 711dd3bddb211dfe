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


class PhasePeaks(TrainerCallback):
    """Measures what each phase of training took at most, and on a CPU the peak of all of them.

    On a CPU every real storage is followed for two steps; the first makes the optimizer's states, the second has them
    throughout. What compiled code allocates cannot be followed: a compiled model or optimizer is not measured there.
    On CUDA the allocator counts one peak for the whole run, and resetting it would change what others read: a phase's
    own peak is known only where it raised that one.

    Attributes:
        bytes: the peak on a CPU; 0 elsewhere.
        phases: phase -> bytes, of those that are known.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.phases: dict[str, int] = {}
        self._ledger = self._device = self._hooks = None
        self._phase, self._before, self._last_step = "start", 0, 0

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        import torch

        if not args.torch_compile:  # a hook would break the graph
            self._hooks = [
                model.register_forward_pre_hook(lambda module, _: self._enter("forward") if module.training else None),
                model.register_forward_hook(lambda module, *_: self._enter("backward") if module.training else None),
            ]
        if args.device.type == "cuda":
            self._device, self._before = args.device, torch.cuda.max_memory_allocated(args.device)
        elif args.device.type == "cpu" and args.world_size == 1 and not _is_compiled(args, optimizer):
            from hf_memopt.estimator.accounting.ledger import Ledger

            self._ledger = Ledger(fake=False)
            self._ledger.begin("start", "other")
            for tensor in (*model.parameters(), *model.buffers(), *_loaded_states(optimizer)):
                self._ledger.add(tensor)
            self._last_step = min(state.global_step + 2, state.max_steps)
            self._ledger.__enter__()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._enter("optimizer")

    def on_step_end(self, args, state, control, **kwargs):
        self._enter("between")
        if self._ledger is not None and state.global_step >= self._last_step:
            self._ledger.__exit__(None, None, None)
            peaks = {name: peak.total for name, peak in self._ledger.peaks.items()}
            self.bytes = max(peaks.values())
            self.phases = {name: peaks[name] for name in ("forward", "backward", "optimizer") if name in peaks}
            self._ledger = None

    def on_prediction_step(self, args, state, control, **kwargs):
        self._enter("eval")

    def on_save(self, args, state, control, **kwargs):
        self._phase = "save"  # it is over by now
        self._enter("between")

    def on_train_end(self, args, state, control, **kwargs):
        self._enter("between")

    def stop(self) -> None:
        """Stop recording, however training ended: the ledger would otherwise run for the whole process."""
        for hook in self._hooks or ():
            hook.remove()
        self._hooks = None
        if self._ledger is not None:
            self._ledger.__exit__(None, None, None)
            self._ledger = None

    def _enter(self, phase: str) -> None:
        if self._ledger is not None:
            self._ledger.begin(phase, "other")
        if self._device is not None:
            import torch

            peak = torch.cuda.max_memory_allocated(self._device)
            if peak > self._before and self._phase not in ("start", "between"):
                self.phases[self._phase] = peak
            self._before = peak
        self._phase = phase


def _loaded_states(optimizer):
    """The states' tensors of an optimizer that resumes from a checkpoint."""
    states = getattr(optimizer, "optimizer", optimizer).state.values() if optimizer is not None else ()
    return [part for state in states for part in state.values() if hasattr(part, "untyped_storage")]


def _is_compiled(args, optimizer) -> bool:
    inner = getattr(optimizer, "optimizer", optimizer)
    return args.torch_compile or type(inner).__module__.startswith("torchao.")


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
