"""Checkpoints that are whole or not there, and that a run under another world size can go on from."""

import contextlib
import json
import logging
import os
import shutil
import traceback
from pathlib import Path
from unittest import mock

from hf_memopt.errors import InputError, as_input_error
from hf_memopt.files import write_whole
from hf_memopt.oom.classify import diagnose, free_memory
from hf_memopt.trainer import sharded_states
from hf_memopt.trainer.recoverability import holds_whole_model
from hf_memopt.trainer.renamed_weights import load_renamed

logger = logging.getLogger(__name__)
UNFINISHED = ".unfinished"  # folder in output_dir; get_last_checkpoint and rotation do not look into it
STATE_FILE = "memory_state.json"
_SMALL_SHARD = "256MB"


class SafeCheckpoints:
    """The part of MemoryTrainerMixin that is about saving and resuming."""

    _save_due = _probes_saving = False
    _newest: Path | None = None  # of the checkpoints that this run wrote or resumed from

    def _save_checkpoint(self, model, trial):
        """Write a checkpoint aside and move it to its place when it is whole.

        Where memory runs out, it is written again in small shards; where that fails too, it is left out and training
        goes on.
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
        with as_input_error(f"probe_save: no checkpoint can be written to {self.args.output_dir}", OSError):
            self._save_whole(model, trial)
        if any(event.get("remedy") == "checkpoint left out" for event in self.memory_events[events:]):
            raise InputError("probe_save: memory does not suffice for a checkpoint: free some, by a lever or a "
                             "smaller per_device_train_batch_size")  # fmt: skip

    def _save_whole(self, model, trial) -> None:
        if self.args.push_to_hub:  # which reads the folder while training goes on
            super()._save_checkpoint(model, trial)
            self._newest = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            return
        for attempt in ("whole", "in small shards"):
            try:
                with self._aside(trial), _sharded(self.model) if attempt != "whole" else contextlib.nullcontext():
                    super()._save_checkpoint(model, trial)
                return self._move_to_its_place(trial)
            except Exception as error:
                found = diagnose(error)
                if not found.smaller_batch_helps or self.args.world_size > 1:
                    raise
                traceback.clear_frames(error.__traceback__)
            free_memory()
            self._discard_unfinished(trial)
            done = "checkpoint left out" if attempt != "whole" else "written again in small shards"
            self._event("oom_recovered", stage="save", message=found.message, remedy=done)

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
        if self.args.should_save:
            self._finish(run / UNFINISHED / name, run / name)
        self.accelerator.wait_for_everyone()
        # A node with a disk of its own still has what its processes wrote: their shards and random states.
        on_own_disk = self.accelerator.is_local_main_process and (run / UNFINISHED / name).is_dir()
        if on_own_disk:
            _replace(run / UNFINISHED / name, run / name)
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

    def emergency_checkpoint(self) -> str | None:
        """Save the last good step without asking other processes anything; the folder, or None where it failed."""
        run = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        if self._newest == run / name and self._newest.is_dir():
            return str(run / name)
        written = run / UNFINISHED / name
        try:
            with _sharded(self.model):
                if self.args.should_save:
                    self.save_model(str(written), _internal_call=True)
                    self._save_optimizer_and_scheduler(str(written))
                    self._save_scaler(str(written))
                self._save_rng_state(str(written))
            if self.args.should_save:
                self._peers.wait_for_files(written, "rng_state_*.pth")
                self._finish(written, run / name)
            self._newest = run / name
            return str(run / name)
        except Exception as error:
            logger.error("the last good step could not be saved: %s", diagnose(error).message)
            return None

    def newest_checkpoint(self) -> str | None:
        """The newest checkpoint that this run wrote or resumed from; None where it has none."""
        return str(self._newest) if self._newest is not None and self._newest.is_dir() else None

    # ---- resuming

    def _inner_training_loop(self, batch_size=None, args=None, resume_from_checkpoint=None, **kwargs):
        if resume_from_checkpoint is not None:
            self._newest = Path(resume_from_checkpoint)
            self._keep_effective_batch(Path(resume_from_checkpoint) / STATE_FILE)
        self._save_due = self.memory_args.probe_save
        return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, **kwargs)

    def _keep_effective_batch(self, file: Path) -> None:
        """Take over the effective batch and the micro-batch that fitted; another world size accumulates otherwise.

        Raises:
            InputError: no accumulation gives the effective batch.
        """
        if not file.is_file():
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        self.limit.agree(before.get("piece_elements"))
        wanted, args = before["effective_batch_size"], self.args
        if self._effective_batch_size() == wanted:
            return
        if before["world_size"] == args.world_size:
            logger.warning("effective batch size: %d in the checkpoint, %d from here on, as the arguments say",
                           wanted, self._effective_batch_size())  # fmt: skip
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
        self._event("effective_batch_kept", effective_batch_size=wanted, world_size=args.world_size,
                    gradient_accumulation_steps=args.gradient_accumulation_steps)  # fmt: skip

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.is_distributed_loading_by_transformers:
            return sharded_states.save_states(self, output_dir)
        return super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.is_distributed_loading_by_transformers and not hasattr(self.model, "peft_config"):
            return sharded_states.load_weights(self.model, resume_from_checkpoint)
        if not (holds_whole_model(self) and load_renamed(model or self.model, resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        if not (holds_whole_model(self) and load_renamed(self.model, self.state.best_model_checkpoint)):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint):
        """Where a device cannot take the checkpoint's states at once, they come by way of the host."""
        import torch

        if self.is_distributed_loading_by_transformers:
            return checkpoint and sharded_states.load_states(self, checkpoint)
        try:
            return super()._load_optimizer_and_scheduler(checkpoint)
        except Exception as error:
            found = diagnose(error)
            if not found.smaller_batch_helps:
                raise
            traceback.clear_frames(error.__traceback__)
        free_memory()
        load = torch.load

        def by_way_of_the_host(file, *args, **kwargs):
            return load(file, *args, **{**kwargs, "map_location": "cpu", "mmap": True})

        with mock.patch.object(torch, "load", by_way_of_the_host):
            super()._load_optimizer_and_scheduler(checkpoint)
        self._event("oom_recovered", stage="resume", message=found.message, remedy="loaded by way of the host")


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
