"""The measured peak of each phase of training, and the batch at which it was highest."""

from typing import Any

import torch
from transformers import TrainerCallback

from hf_memopt.recipe.prediction import PeakBatch

_OF_A_BATCH = ("forward", "backward", "eval")


class PhasePeaks(TrainerCallback):
    """Measures what each phase of training took at most, and on a CPU the peak of all of them.

    On a CPU every real storage is followed for two steps; the first makes the optimizer's states, the second has them
    throughout. What compiled code allocates cannot be followed: a compiled model or optimizer is not measured there.
    On CUDA the allocator counts one peak for the whole run, and resetting it would change what others read: a phase's
    own peak is known only where it raised that one.

    Attributes:
        bytes: the peak on a CPU; 0 elsewhere.
        phases: phase -> bytes, of those that are known.
        batch: the one at whose forward or backward memory was highest; None where none is known.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.phases: dict[str, int] = {}
        self.batch: PeakBatch | None = None
        self._running: PeakBatch | None = None
        self._highest = 0
        self._ledger = self._device = self._hooks = self._optimizer = None
        self._phase, self._before, self._last_step = "start", 0, 0

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        inner = getattr(optimizer, "optimizer", optimizer)
        compiled = args.torch_compile or type(inner).__module__.startswith("torchao.")
        if not args.torch_compile:  # a hook would break the graph
            self._hooks = [
                model.register_forward_pre_hook(self._on_forward, with_kwargs=True),
                model.register_forward_hook(lambda module, *_: self._enter("backward") if module.training else None),
            ]
            self._optimizer = inner
        if args.device.type == "cuda":
            self._device, self._before = args.device, torch.cuda.max_memory_allocated(args.device)
        elif args.device.type == "cpu" and args.world_size == 1 and not compiled:
            from hf_memopt.estimator.accounting.ledger import Ledger

            self._ledger = Ledger()
            self._ledger.begin("start", "other")
            states = inner.state.values() if inner is not None else ()
            for tensor in (
                *model.parameters(),
                *model.buffers(),
                *(part for tensors in states for part in tensors.values() if hasattr(part, "untyped_storage")),
            ):
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
        self._running = self._optimizer = None
        for hook in self._hooks or ():
            hook.remove()
        self._hooks = None
        if self._ledger is not None:
            self._ledger.__exit__(None, None, None)
            self._ledger = None

    def _on_forward(self, module, args, kwargs) -> None:
        if module.training:
            self._enter("forward")
        elif self._phase != "eval":
            self._enter("eval")
        tensors = _model_inputs(kwargs)
        if tensors is None or (self._ledger is None and self._device is None):
            self._running = None
            return
        weight = next((weight for weight in module.parameters() if weight.requires_grad), None)
        self._running = PeakBatch(
            tensors,
            module.training,
            with_gradients=weight is not None and weight.grad is not None,
            with_states=bool(getattr(self._optimizer, "state", True)),
        )

    def _enter(self, phase: str) -> None:
        if self._ledger is not None:
            peaks = self._ledger.peaks.items()  # so far; while a batch was on the device
            self._note_batch(max((peak.total for name, peak in peaks if name in _OF_A_BATCH), default=0))
            self._ledger.begin(phase, "other")
        if self._device is not None:
            peak = torch.cuda.max_memory_allocated(self._device)
            if peak > self._before and self._phase not in ("start", "between"):
                self.phases[self._phase] = peak
                if self._phase in _OF_A_BATCH:
                    self._note_batch(peak)
            self._before = peak
        self._phase = phase

    def _note_batch(self, peak: int) -> None:
        if peak > self._highest:
            self._highest = peak
            self.batch = self._running and self._running.on_host()


def _model_inputs(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The tensors of a batch as the model takes it; None for batches of another form.

    Of token ids and masks of tokens their values are kept, which are small; pixels and masks of pixels would add to
    what is measured.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    if not isinstance(kwargs.get("input_ids"), torch.Tensor) or any(
        isinstance(value, list) for value in kwargs.values()
    ):
        return None
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.dim()}
    with _disable_current_modes():  # the ledger would count the bytes that meta tensors stand for
        return {
            name: value.to("meta")
            if name != "position_ids" and value.dim() > (1 if value.is_floating_point() else 2)
            else value
            for name, value in tensors.items()
        }
