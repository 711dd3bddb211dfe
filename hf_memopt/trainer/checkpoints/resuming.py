"""Resuming: from an intact checkpoint, with the effective batch of the run that wrote it."""

import logging
from pathlib import Path

from hf_memopt.errors import InputError
from hf_memopt.files import read_json
from hf_memopt.trainer.checkpoints.intact import check_intact, is_stale
from hf_memopt.trainer.checkpoints.saving import STATE_FILE

logger = logging.getLogger(__name__)
_INTERVALS = ("logging_steps", "eval_steps", "save_steps")


class SafeResume:
    """The part of MemoryTrainerMixin that decides what a run resumes from."""

    def _agree_on_checkpoint(self, checkpoint: str | None) -> str | None:
        """The same checkpoint on every process: nodes without a shared disk may have lost different ones."""
        if self._peers.alone:
            return checkpoint
        number = Path(checkpoint or "").name.removeprefix("checkpoint-")
        step = -1 if checkpoint is None else int(number) if number.isdecimal() else 0
        oldest, newest = self._peers.smallest(step), -self._peers.smallest(-step)
        if oldest == newest:
            return checkpoint
        if oldest < 0:
            raise InputError(
                f"resume_from_checkpoint: some nodes have a checkpoint in {self.args.output_dir} and others none: "
                "copy it to all of them, or start afresh with --resume_from_checkpoint no"
            )
        agreed = Path(checkpoint).with_name(f"checkpoint-{oldest}")
        check_intact(agreed, self.args.save_only_model)
        return str(agreed)

    def _inner_training_loop(self, batch_size=None, args=None, resume_from_checkpoint=None, **kwargs):
        if resume_from_checkpoint is not None:
            self._newest = Path(resume_from_checkpoint)
            self._keep_effective_batch(Path(resume_from_checkpoint) / STATE_FILE)
        return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, **kwargs)

    def _keep_effective_batch(self, file: Path) -> None:
        """Keep the checkpoint's effective batch, by other accumulation steps where the world size changed, and start
        with the chunk size that fitted.
        """
        if not file.is_file() or is_stale(file.parent):
            return
        state = read_json(file)
        for name in ("effective_batch_size", "world_size"):
            if not isinstance(state.get(name), int) or state[name] < 1:
                raise InputError(
                    f"{file}: {name}={state.get(name)!r} is not a whole number of 1 or more: use another checkpoint"
                )
        elements = state.get("piece_elements")
        self.limit.adopt(elements if isinstance(elements, int) and elements > 0 else None)
        wanted, args = state["effective_batch_size"], self.args
        if self._effective_batch_size() == wanted:
            return
        if state["world_size"] == args.world_size:
            logger.warning(
                "effective batch size: %d in the checkpoint, %d from here on, as set in the arguments",
                wanted,
                self._effective_batch_size(),
            )
            return
        at_once = args.train_batch_size * self.batches
        if wanted % at_once:
            raise InputError(
                f"the checkpoint's effective batch size is {wanted}, which {args.world_size} process(es) with "
                f"per_device_train_batch_size={args.train_batch_size} cannot make: choose one that divides "
                f"{wanted / self.batches:g}"
            )
        if args.deepspeed_plugin is not None:
            raise InputError(
                f"the checkpoint's effective batch size is {wanted}, here it would be {self._effective_batch_size()}: "
                f"set gradient_accumulation_steps={wanted // at_once}"
            )
        args.gradient_accumulation_steps = wanted // at_once
        self._event(
            "effective_batch_kept",
            effective_batch_size=wanted,
            world_size=args.world_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
        )

    def _run_epoch(self, *args, **kwargs):
        # transformers 5.23 checks max_steps after a step only: resumed from the last step, it would train one more.
        if self.state.global_step >= self.state.max_steps:
            logger.warning("all %d steps are done already: nothing left to train", self.state.max_steps)
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        """Let the arguments decide logging_steps, eval_steps and save_steps, as they decide everything else.

        transformers 5.23 takes these three from the checkpoint's trainer_state.json and warns that the arguments
        differ. Can go when it does not.
        """
        position = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None:
            self._keep_own_intervals(resume_from_checkpoint, max_steps)
        return position

    def _keep_own_intervals(self, checkpoint, max_steps: int) -> None:
        state = self.state
        before = {name: getattr(state, name) for name in _INTERVALS}
        state.compute_steps(self.args, max_steps)
        if self.args.process_index != 0:
            return
        logger.warning("resuming from %s (step %d of %d)", checkpoint, state.global_step, state.max_steps)
        changed = [
            f"{name}={getattr(state, name)} (before: {steps})"
            for name, steps in before.items()
            if getattr(state, name) != steps
        ]
        if changed:
            logger.warning("from here on %s", ", ".join(changed))
