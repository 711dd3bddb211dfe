"""What a resumed run says first: where it resumes from, and which intervals are others than before."""

import logging

logger = logging.getLogger(__name__)
_INTERVALS = ("logging_steps", "eval_steps", "save_steps")


class AnnouncedResume:
    """The part of MemoryTrainerMixin that takes over the state of a checkpoint."""

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint,
                             trial):  # fmt: skip
        """The arguments' intervals count, as every other argument does.

        transformers 5.23 takes those of the checkpoint's trainer_state.json and warns that the arguments differ.
        """
        done = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None:
            before = {name: getattr(self.state, name) for name in _INTERVALS}
            self.state.compute_steps(self.args, max_steps)
            if self.args.process_index == 0:
                self._announce_resume(resume_from_checkpoint, before)
        return done

    def _announce_resume(self, checkpoint, before: dict[str, int]) -> None:
        state = self.state
        logger.warning("resuming from %s (step %d of %d)", checkpoint, state.global_step, state.max_steps)
        changed = [f"{name}={getattr(state, name)} (before: {steps})" for name, steps in before.items()
                   if getattr(state, name) != steps]  # fmt: skip
        if changed:
            logger.warning("from here on %s", ", ".join(changed))
