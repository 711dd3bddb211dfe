"""Checkpoints that are either complete or absent: written aside, then renamed."""

import contextlib
import json
import logging
import os
import shutil
import traceback
from pathlib import Path
from unittest import mock

from hf_memopt.disk import write_failure
from hf_memopt.errors import InputError
from hf_memopt.files import write_whole
from hf_memopt.oom.classify import diagnose, free_memory
from hf_memopt.trainer.checkpoints import sharded_states
from hf_memopt.trainer.checkpoints.intact import MANIFEST, write_manifest
from hf_memopt.trainer.step.recoverability import holds_whole_model

logger = logging.getLogger(__name__)
UNFINISHED = ".unfinished"  # folder in output_dir; get_last_checkpoint and rotation do not look into it
STATE_FILE = "memory_state.json"
_SMALL_SHARD = "256MB"  # host memory that serializing one shard takes


class SafeCheckpoints:
    """The part of MemoryTrainerMixin that writes checkpoints.

    It overrides private methods of transformers 5.23's Trainer: _save_checkpoint (called at every save),
    _maybe_log_save_evaluate (at the end of each step), _inner_training_loop and _save_optimizer_and_scheduler. If one
    is renamed, plain Trainer's checkpoints are written instead, and test_resume.py fails.
    """

    _save_due = _probes_saving = False
    _newest: Path | None = None  # newest checkpoint that this run wrote or resumed from

    def _save_checkpoint(self, model, trial):
        """Write a checkpoint into a temporary folder and rename that when it is complete.

        Where memory runs out, it is written again in small shards; where that fails too, it is skipped and training
        continues.

        Raises:
            InputError: it is the one after the first step (probe_save), and cannot be written.
        """
        if not self._probes_saving:
            return self._save_atomically(model, trial)
        events = len(self.memory_events)
        try:
            self._save_atomically(model, trial)
        except InputError as error:
            raise InputError(f"probe_save: {error}") from error
        if any(event.get("remedy") == "checkpoint left out" for event in self.memory_events[events:]):
            raise InputError(
                "probe_save: not enough memory to write a checkpoint: lower per_device_train_batch_size, or turn on a "
                "memory argument"
            )

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self._probes_saving, self._save_due = self._save_due, False
        if self._probes_saving:
            self.control.should_save = True
        try:
            return super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self._probes_saving = False

    def _save_atomically(self, model, trial) -> None:
        if self.args.push_to_hub:  # a thread of the Trainer uploads the folder while training continues
            place = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            # An older run's checkpoint is overwritten file by file, and its manifest would call that damage.
            for name in (MANIFEST, STATE_FILE) if self.args.should_save else ():
                (place / name).unlink(missing_ok=True)
            super()._save_checkpoint(model, trial)
            self._newest = place
            return
        if self.is_in_train:
            self._runner.remember_state()  # the step is finished: the next one starts from this state
        unfinished = str(self._unfinished(trial))
        for attempt in ("whole", "in small shards"):
            try:
                # _save_checkpoint asks this private method for the folder (transformers 5.23) and offers no other way
                # to choose it. If it is renamed, checkpoints are written in place, and an interrupted save leaves a
                # damaged one.
                aside = mock.patch.object(self, "_get_output_dir", lambda *_, **__: unfinished)
                with aside, _small_shards(self.model) if attempt != "whole" else contextlib.nullcontext():
                    super()._save_checkpoint(model, trial)
                return self._move_to_its_place(trial)
            except Exception as error:
                self._check_disk(error, trial)
                diagnosis = diagnose(error)
                if not diagnosis.smaller_batch_helps:
                    raise
                if self.args.world_size > 1:
                    why = "processes that save together cannot start the save again"
                    self._ending.end_run("save", diagnosis, why=why, intact=holds_whole_model(self))
                traceback.clear_frames(error.__traceback__)
            free_memory()
            self._discard_unfinished(trial)
            remedy = "checkpoint left out" if attempt != "whole" else "written again in small shards"
            self._event("oom_recovered", stage="save", message=diagnosis.message, remedy=remedy)

    def _check_disk(self, error: Exception, trial) -> None:
        """Delete the unfinished checkpoint and raise where it could not be written to the disk."""
        if (reason := write_failure(error)) is None:
            return
        self._discard_unfinished(trial)
        newest = self.newest_checkpoint()
        resumes = f"resumes from {Path(newest).name}" if newest else "starts at step 0: there is no checkpoint yet"
        raise InputError(
            f"no checkpoint can be written to {self.args.output_dir}: {reason}. Make room or set save_total_limit, "
            f"and the same command {resumes}"
        ) from error

    def _unfinished(self, trial) -> Path:
        return Path(self._get_output_dir(trial)) / UNFINISHED

    def _discard_unfinished(self, trial) -> None:
        if self.args.should_save:
            shutil.rmtree(self._unfinished(trial), ignore_errors=True)

    def _rotate(self, run: Path) -> None:
        if hasattr(self, "_rotate_checkpoints"):  # transformers before 5.2
            return self._rotate_checkpoints(output_dir=str(run))
        from transformers.trainer_utils import rotate_checkpoints

        rotate_checkpoints(
            output_dir=str(run),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _move_to_its_place(self, trial) -> None:
        self.accelerator.wait_for_everyone()
        run = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        best = self.state.best_global_step
        if best and ((run / f"checkpoint-{best}").is_dir() or best == self.state.global_step):
            # The Trainer looked for it in `.unfinished`.
            self.state.best_model_checkpoint = str(run / f"checkpoint-{best}")
        # A node with its own disk holds only what its processes wrote: shards and random states, no
        # trainer_state.json. It checks before the first process renames its folder, which a network disk may go on
        # showing for a while.
        written = run / UNFINISHED / name
        on_own_disk = (
            self.accelerator.is_local_main_process
            and not self.args.should_save
            and written.is_dir()
            and not (written / "trainer_state.json").is_file()
        )
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._finish(written, run / name)
        if on_own_disk:
            write_manifest(written)
            _replace(written, run / name)
        if self.args.should_save or on_own_disk:
            self._rotate(run)
        self._newest = run / name
        self.accelerator.wait_for_everyone()

    def _finish(self, written: Path, place: Path) -> None:
        """Add state and manifest to a written checkpoint and rename it."""
        self.state.save_to_json(str(written / "trainer_state.json"))
        state = {
            "effective_batch_size": self._effective_batch_size(),
            "world_size": self.args.world_size,
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "piece_elements": self.limit.elements,
        }
        write_whole(written / STATE_FILE, json.dumps(state, indent=2) + "\n")
        write_manifest(written)
        _replace(written, place)

    def _effective_batch_size(self) -> int:
        return self.args.train_batch_size * self.args.gradient_accumulation_steps * self.batches

    def unfinished(self, step: int) -> Path:
        """The folder that a checkpoint is written to before it is complete."""
        return Path(self.args.output_dir) / UNFINISHED / f"checkpoint-{step}"

    def emergency_checkpoint(self) -> str | None:
        """Save the last good step without collectives, since other processes may be blocked or gone.

        Returns:
            The folder; None where saving failed.
        """
        written = self.unfinished(self.state.global_step)
        place = Path(self.args.output_dir) / written.name
        if self._newest == place and place.is_dir():
            return str(place)
        try:
            self._runner.buffers.restore(self._runner.resume_state.buffers)
            if self.args.should_save:
                with _small_shards(self.model):
                    self.save_model(str(written), _internal_call=True)
                self._save_optimizer_and_scheduler(str(written))
                self._save_scaler(str(written))
            # Last: another thread may draw random numbers while weights are saved.
            self._save_random_states()
            if self.args.should_save:
                self._peers.wait_for_files(written, "rng_state_*.pth")
                self._finish(written, place)
            self._newest = place
            return str(place)
        except Exception as error:
            logger.error("the last good step could not be saved: %s", diagnose(error).message)
            return None

    def _save_random_states(self) -> None:
        """Save this process's random states for the last two steps: the first process, which saves the weights, may be
        one step ahead of this one, or behind it."""
        states = self._runner.resume_states or {self.state.global_step: None}
        for step, state in states.items():
            if state is not None:
                state.random.restore()
            if step == self.state.global_step or not self.args.should_save:
                self._save_rng_state(str(self.unfinished(step)))

    def newest_checkpoint(self) -> str | None:
        """The newest checkpoint that this run wrote or resumed from; None where there is none."""
        return str(self._newest) if self._newest is not None and self._newest.is_dir() else None

    def _inner_training_loop(self, *args, **kwargs):
        self._save_due = self.memory_args.probe_save
        return super()._inner_training_loop(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.is_distributed_loading_by_transformers:
            return sharded_states.save_states(self, output_dir)
        return super()._save_optimizer_and_scheduler(output_dir)


@contextlib.contextmanager
def _small_shards(model):
    """A context in which save_pretrained writes many small shards: each is serialized in host memory as a whole."""
    save = getattr(model, "save_pretrained", None)
    if save is None or hasattr(model, "peft_config"):
        yield
        return

    def in_shards(*args, **kwargs):
        return save(*args, **{**kwargs, "max_shard_size": _SMALL_SHARD})

    with mock.patch.object(model, "save_pretrained", in_shards):
        yield


def _replace(written: Path, place: Path) -> None:
    """Rename a complete folder to its final name, replacing an older checkpoint."""
    for file in written.rglob("*"):
        if file.is_file():
            with open(file, "rb+") as opened:  # Windows flushes only what is open for writing
                os.fsync(opened.fileno())  # else a power cut can leave the renamed folder with empty files
    shutil.rmtree(place, ignore_errors=True)
    os.rename(written, place)
    shutil.rmtree(written.parent, ignore_errors=True)
