"""Checkpoints that are complete or not there."""

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
from hf_memopt.trainer import manifest, sharded_states
from hf_memopt.trainer.recoverability import holds_whole_model

logger = logging.getLogger(__name__)
UNFINISHED = ".unfinished"  # folder in output_dir; get_last_checkpoint and rotation do not look into it
STATE_FILE = "memory_state.json"
_SMALL_SHARD = "256MB"


class SafeCheckpoints:
    """The part of MemoryTrainerMixin that writes checkpoints."""

    _save_due = _probes_saving = False
    _newest: Path | None = None  # of the checkpoints that this run wrote or resumed from

    def _save_checkpoint(self, model, trial):
        """Write a checkpoint aside and move it to its place when it is complete.

        Where memory runs out, it is written again in small shards; where that fails too, it is left out and training
        continues.
        """
        if self._probes_saving:
            return self._probe_saving(model, trial)
        return self._save_whole(model, trial)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self._probes_saving, self._save_due = self._save_due, False
        if self._probes_saving:
            self.control.should_save = True
        try:
            return super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self._probes_saving = False

    def _probe_saving(self, model, trial) -> None:
        """The first checkpoint, without which the run would be lost hours later.

        Raises:
            InputError: it cannot be written.
        """
        events = len(self.memory_events)
        try:
            self._save_whole(model, trial)
        except InputError as error:
            raise InputError(f"probe_save: {error}") from error
        if any(event.get("remedy") == "checkpoint left out" for event in self.memory_events[events:]):
            raise InputError(
                "probe_save: memory does not suffice for a checkpoint: free some, by a lever or a "
                "smaller per_device_train_batch_size"
            )

    def _save_whole(self, model, trial) -> None:
        if self.args.push_to_hub:  # which reads the folder while training continues
            self._forget_notes(Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}")
            super()._save_checkpoint(model, trial)
            self._newest = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            return
        if self.is_in_train:
            self._runner.remember_state()  # the step is finished: the next one begins here
        for attempt in ("whole", "in small shards"):
            try:
                with self._aside(trial), _sharded(self.model) if attempt != "whole" else contextlib.nullcontext():
                    super()._save_checkpoint(model, trial)
                return self._move_to_its_place(trial)
            except Exception as error:
                self._check_disk(error, trial)
                found = diagnose(error)
                if not found.smaller_batch_helps:
                    raise
                if self.args.world_size > 1:
                    why = "processes that save together cannot begin again"
                    self._ending.exhausted("save", found, why=why, intact=holds_whole_model(self))
                traceback.clear_frames(error.__traceback__)
            free_memory()
            self._discard_unfinished(trial)
            done = "checkpoint left out" if attempt != "whole" else "written again in small shards"
            self._event("oom_recovered", stage="save", message=found.message, remedy=done)

    def _forget_notes(self, place: Path) -> None:
        """An older run's checkpoint of this step is written over file by file: its manifest would call that damage."""
        if self.args.should_save:
            for name in (manifest.FILE, STATE_FILE):
                (place / name).unlink(missing_ok=True)

    def _check_disk(self, error: Exception, trial) -> None:
        """Raise where a disk did not take a checkpoint. The half-written one is deleted, which makes room.

        Raises:
            InputError: with what the run can be resumed from.
        """
        if (reason := write_failure(error)) is None:
            return
        self._discard_unfinished(trial)
        newest = self.newest_checkpoint()
        resumes = f"resumes from {Path(newest).name}" if newest else "begins anew: there is no checkpoint yet"
        raise InputError(
            f"no checkpoint can be written to {self.args.output_dir}: {reason}. Make room or set save_total_limit, "
            f"and the same command {resumes}"
        ) from error

    @contextlib.contextmanager
    def _aside(self, trial):
        """The Trainer saves into a folder beside the checkpoints."""
        aside = self._unfinished(trial)
        with mock.patch.object(self, "_get_output_dir", lambda *_, **__: str(aside)):
            yield

    def _unfinished(self, trial) -> Path:
        return Path(self._get_output_dir(trial)) / UNFINISHED

    def _discard_unfinished(self, trial) -> None:
        if self.args.should_save:
            shutil.rmtree(self._unfinished(trial), ignore_errors=True)

    def _move_to_its_place(self, trial) -> None:
        from transformers.trainer_utils import rotate_checkpoints

        self.accelerator.wait_for_everyone()
        run = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        self._name_best(run)
        # A node with a disk of its own has what its processes wrote, their shards and random states, and nothing of
        # the first process. It looks before that one moves its folder: a network disk may show it for a while longer.
        written = run / UNFINISHED / name
        on_own_disk = self.accelerator.is_local_main_process and not self.args.should_save
        on_own_disk = on_own_disk and written.is_dir() and not (written / "trainer_state.json").is_file()
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._finish(written, run / name)
        if on_own_disk:
            manifest.write_manifest(written)
            _replace(written, run / name)
        if self.args.should_save or on_own_disk:
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self._newest = run / name
        self.accelerator.wait_for_everyone()

    def _name_best(self, run: Path) -> None:
        """The Trainer saw the best checkpoint, if it is this one, in the folder beside."""
        best = self.state.best_global_step
        if best and ((run / f"checkpoint-{best}").is_dir() or best == self.state.global_step):
            self.state.best_model_checkpoint = str(run / f"checkpoint-{best}")

    def _finish(self, written: Path, place: Path) -> None:
        """Complete a written checkpoint, and rename it."""
        self.state.save_to_json(str(written / "trainer_state.json"))
        write_whole(written / STATE_FILE, json.dumps(self._memory_state(), indent=2) + "\n")
        manifest.write_manifest(written)
        _replace(written, place)

    def _memory_state(self) -> dict:
        args = self.args
        return {
            "effective_batch_size": self._effective_batch_size(),
            "world_size": args.world_size,
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "piece_elements": self.limit.elements,
        }

    def _effective_batch_size(self) -> int:
        return self.args.train_batch_size * self.args.gradient_accumulation_steps * self.batches

    def unfinished(self, step: int) -> Path:
        """Where this process writes its part of a checkpoint before it is complete."""
        return Path(self.args.output_dir) / UNFINISHED / f"checkpoint-{step}"

    def emergency_checkpoint(self) -> str | None:
        """Save the last good step without asking other processes anything; the folder, or None where it failed."""
        written = self.unfinished(self.state.global_step)
        place = Path(self.args.output_dir) / written.name
        if self._newest == place and place.is_dir():
            return str(place)
        try:
            if self.args.should_save:
                with _sharded(self.model):
                    self.save_model(str(written), _internal_call=True)
                self._save_optimizer_and_scheduler(str(written))
                self._save_scaler(str(written))
            # Not before: another thread may draw while weights are saved.
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
        """This process's part of a checkpoint. Of the last two steps: the first process, which saves the weights, may
        have finished one step more than this one, or less."""
        states = self._runner.resume_states or {self.state.global_step: None}
        for step, state in states.items():
            if state is not None:
                state.restore(self)
            if step == self.state.global_step or not self.args.should_save:
                self._save_rng_state(str(self.unfinished(step)))

    def newest_checkpoint(self) -> str | None:
        """The newest checkpoint that this run wrote or resumed from; None where it has none."""
        return str(self._newest) if self._newest is not None and self._newest.is_dir() else None

    def _inner_training_loop(self, *args, **kwargs):
        self._save_due = self.memory_args.probe_save
        return super()._inner_training_loop(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.is_distributed_loading_by_transformers:
            return sharded_states.save_states(self, output_dir)
        return super()._save_optimizer_and_scheduler(output_dir)


@contextlib.contextmanager
def _sharded(model):
    """save_pretrained writes small shards, one after another, instead of serializing the whole model at once."""
    save = getattr(model, "save_pretrained", None)
    if save is None or hasattr(model, "peft_config"):
        yield
        return

    def in_shards(*args, **kwargs):
        return save(*args, **{**kwargs, "max_shard_size": _SMALL_SHARD})

    with mock.patch.object(model, "save_pretrained", in_shards):
        yield


def _replace(written: Path, place: Path) -> None:
    """Make a written folder a checkpoint."""
    _to_disk(written)
    shutil.rmtree(place, ignore_errors=True)
    os.rename(written, place)
    shutil.rmtree(written.parent, ignore_errors=True)


def _to_disk(folder: Path) -> None:
    """Have the system write a folder's files before the rename makes it a checkpoint."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
