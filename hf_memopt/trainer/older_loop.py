"""transformers before 5.3, whose Trainer trains in one long method: here a callback and wrappers stand in for methods.

Newer versions have _prepare_for_training, _clip_grad_norm, _init_training_state and _run_epoch, and MemoryTrainerMixin
has its own of them. Can go together with the support of these versions.
"""

from typing import TYPE_CHECKING
from unittest import mock

from transformers import TrainerCallback

from hf_memopt.errors import InputError
from hf_memopt.stack.versions import has

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer


class OlderLoop:
    """The part of MemoryTrainerMixin for older versions; does nothing under newer ones."""

    def get_sp_size(self) -> int:
        return super().get_sp_size() if has("transformers", "5.0") else 1

    def _inner_training_loop(self, batch_size=None, args=None, resume_from_checkpoint=None, **kwargs):
        train = super()._inner_training_loop
        if has("transformers", "5.3"):
            return train(batch_size, args, resume_from_checkpoint, **kwargs)
        begins, clip = _Begins(self, resume_from_checkpoint), self.accelerator.clip_grad_norm_

        def clip_again(parameters, *limits, **more):
            parameters = list(parameters)
            return self._updates.clip(lambda model: clip(parameters, *limits, **more), self.model)

        self.add_callback(begins)
        try:
            with mock.patch.object(self.accelerator, "clip_grad_norm_", clip_again), self._deepspeed_loads_safely():
                return train(batch_size, args, resume_from_checkpoint, **kwargs)
        finally:
            self.remove_callback(begins)


class _Begins(TrainerCallback):
    """The moment before the first step: optimizer and loaders are made, and a checkpoint is loaded."""

    def __init__(self, trainer: "MemoryTrainer", checkpoint) -> None:
        self.trainer = trainer
        self.checkpoint = checkpoint

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        if self.checkpoint is not None:
            self.trainer._keep_own_intervals(self.checkpoint, state.max_steps)
            if state.global_step >= state.max_steps:  # the loop looks after a step only, and would train one more
                raise InputError(f"all {state.max_steps} steps are done already: nothing left to train")
        self.trainer._training_begins(self.trainer.model_wrapped, train_dataloader)
