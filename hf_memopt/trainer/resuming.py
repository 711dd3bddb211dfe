"""Resuming: from an intact checkpoint, without running what is in it, with the effective batch of the run before."""

import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hf_memopt.errors import InputError, one_line
from hf_memopt.files import read_json
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose, free_memory
from hf_memopt.trainer import sharded_states
from hf_memopt.trainer.checkpoints import STATE_FILE
from hf_memopt.trainer.intact import check_intact, newest_intact
from hf_memopt.trainer.manifest import is_stale
from hf_memopt.trainer.optimizer_guard import torch_optimizer
from hf_memopt.trainer.recoverability import holds_whole_model
from hf_memopt.trainer.renamed_weights import load_renamed
from hf_memopt.trainer.safe_load import without_code

logger = logging.getLogger(__name__)
_INTERVALS = ("logging_steps", "eval_steps", "save_steps")


class SafeResume:
    """The part of MemoryTrainerMixin that resumes from a checkpoint."""

    def _checkpoint_to_resume(self, named) -> str | None:
        """The checkpoint that train() was asked to resume from; True stands for the newest that is intact.

        Raises:
            InputError: it is missing or damaged.
        """
        output_dir, only_model = Path(self.args.output_dir), self.args.save_only_model
        if named is None or named is False:
            return None
        if named is not True:
            check_intact(Path(named), only_model)
            return str(named)
        newest = newest_intact(output_dir, only_model)
        if newest is None:
            raise InputError(f"resume_from_checkpoint: {output_dir} holds no checkpoint-N folder")
        return str(newest)

    def _agree_on_checkpoint(self, checkpoint: str | None) -> str | None:
        """The same checkpoint on every process: machines without a shared disk may have lost different ones.

        Raises:
            InputError: some processes have a checkpoint and others none, or the oldest that a process chose is
                missing or damaged on this one.
        """
        if self._peers.alone:
            return checkpoint
        number = Path(checkpoint or "").name.removeprefix("checkpoint-")
        step = -1 if checkpoint is None else int(number) if number.isdecimal() else 0
        oldest, newest = self._peers.smallest(step), -self._peers.smallest(-step)
        if oldest == newest:
            return checkpoint
        if oldest < 0:
            raise InputError(
                f"resume_from_checkpoint: some machines have a checkpoint in {self.args.output_dir} and others none: "
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
        """Take over the effective batch and the micro-batch that fitted; another world size accumulates otherwise.

        Raises:
            InputError: no accumulation gives the effective batch.
        """
        if not file.is_file() or is_stale(file.parent):
            return
        before = _read_state(file)
        self.limit.agree(before.get("piece_elements"))
        wanted, args = before["effective_batch_size"], self.args
        if self._effective_batch_size() == wanted:
            return
        if before["world_size"] == args.world_size:
            logger.warning(
                "effective batch size: %d in the checkpoint, %d from here on, as the arguments say",
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
        """Nothing, where the checkpoint is of the last step: transformers 5.23 would take one step more."""
        if self.state.global_step >= self.state.max_steps:
            logger.warning("all %d steps are done already: nothing is left to train", self.state.max_steps)
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    # ---- weights and states

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with _loading(resume_from_checkpoint):
            if self.is_distributed_loading_by_transformers and not hasattr(self.model, "peft_config"):
                return sharded_states.load_weights(self.model, resume_from_checkpoint)
            if not (holds_whole_model(self) and load_renamed(model or self.model, resume_from_checkpoint)):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        with _loading(self.state.best_model_checkpoint):
            if not (holds_whole_model(self) and load_renamed(self.model, self.state.best_model_checkpoint)):
                super()._load_best_model()

    def _prepare_for_training(self, *args, **kwargs):
        """transformers 5.23 calls its deepspeed_load_checkpoint() in the middle of this."""
        from transformers import trainer

        load = trainer.deepspeed_load_checkpoint

        def load_safely(engine, checkpoint, *args, **kwargs):
            with _loading(checkpoint):
                return load(engine, checkpoint, *args, **kwargs)

        with mock.patch.object(trainer, "deepspeed_load_checkpoint", load_safely):
            return super()._prepare_for_training(*args, **kwargs)

    def _issue_warnings_after_load(self, load_result):
        """A weight that the checkpoint lacks would keep the value that the model was made with.

        Raises:
            InputError: a weight is missing that is not tied to another one.
        """
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        computed = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())  # Marian's positions
        absent = set(load_result.missing_keys) & weights.keys() - computed
        loaded = {id(weight) for name, weight in weights.items() if name not in absent}
        missing = sorted(name for name in absent if id(weights[name]) not in loaded)
        if missing:
            raise InputError(
                f"the checkpoint lacks {len(missing)} of the model's {len(weights)} weights ({missing[0]}, …): "
                "it is of another model"
            )
        load_result.missing_keys[:] = set(load_result.missing_keys) - absent  # what is tied is there
        super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint):
        """Where a device cannot take the checkpoint's states at once, they are loaded through host memory.

        Raises:
            InputError: they are damaged, could run code, or are another optimizer's.
        """
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        with _loading(checkpoint):
            if self.is_distributed_loading_by_transformers:
                return sharded_states.load_states(self, checkpoint)
            groups = torch_optimizer(self).param_groups
            settings = set().union(*groups)
            found = self._load_states(checkpoint)
            if missing := settings - set().union(*torch_optimizer(self).param_groups):
                optim = self.args.optim.value
                raise InputError(
                    f"{checkpoint}/optimizer.pt is of another optimizer: it lacks {min(missing)} of optim={optim}"
                )
        if found is not None:
            self._event("oom_recovered", stage="resume", message=found.message, remedy="loaded through host memory")

    def _load_states(self, checkpoint) -> Diagnosis | None:
        """The failure that was survived, if there was one."""
        import torch

        try:
            super()._load_optimizer_and_scheduler(checkpoint)
            return None
        except Exception as error:
            found = diagnose(error)
            if not found.smaller_batch_helps:
                raise
            traceback.clear_frames(error.__traceback__)
        free_memory()
        load = torch.load

        def through_host_memory(file, *args, **kwargs):
            return load(file, *args, **{**kwargs, "map_location": "cpu", "mmap": True})

        with mock.patch.object(torch, "load", through_host_memory):
            super()._load_optimizer_and_scheduler(checkpoint)
        return found

    def _load_rng_state(self, checkpoint):
        if checkpoint is None:
            return
        with _loading(checkpoint):
            super()._load_rng_state(checkpoint)

    # ---- what is said

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
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
        changed = [
            f"{name}={getattr(state, name)} (before: {steps})"
            for name, steps in before.items()
            if getattr(state, name) != steps
        ]
        if changed:
            logger.warning("from here on %s", ", ".join(changed))


@contextlib.contextmanager
def _loading(checkpoint: str) -> Iterator[None]:
    """What a library says of a checkpoint that is damaged, or of another model or optimizer, becomes one sentence.

    Raises:
        InputError: it cannot be loaded, or could run code.
    """
    try:
        with without_code(checkpoint):
            yield
    except InputError:
        raise
    except Exception as error:
        if diagnose(error).kind is not OomKind.NOT_MEMORY:
            raise
        raise InputError(
            f"resume_from_checkpoint: {checkpoint} cannot be loaded into this model and optimizer: "
            f"{one_line(error)[:300]}"
        ) from error


def _read_state(file: Path) -> dict:
    """What a run notes of its batches beside a checkpoint.

    Raises:
        InputError: it is damaged.
    """
    state = read_json(file)
    for name in ("effective_batch_size", "world_size"):
        if not isinstance(state.get(name), int) or state[name] < 1:
            raise InputError(f"{file}: {name}={state.get(name)!r} is no number of 1 or more: name another checkpoint")
    elements = state.get("piece_elements")
    return state | {"piece_elements": elements if isinstance(elements, int) and elements > 0 else None}
