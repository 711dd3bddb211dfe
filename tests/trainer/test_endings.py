"""Runs that memory ends: reports, exit codes, and the checkpoint of the last good step."""

import itertools
import json
import os
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from faults import Strikes
from small_runs import OOM, Rows, train
from transformers import Trainer, TrainerCallback

from hf_memopt import InputError, MemoryTrainer, TrainingOutOfMemory
from hf_memopt.program import run
from hf_memopt.trainer import ending


@pytest.mark.slow
def test_one_sample_that_does_not_fit_ends_the_run(tmp_path):
    """Diagnosis, checkpoint of the last good step, exit code 75; resuming gives the uninterrupted run."""
    fields = {"max_steps": 6, "per_device_train_batch_size": 2}
    wanted = train(tmp_path / "plain", kind=Trainer, **fields)

    def full(trainer):
        forward = trainer.model.forward

        @wraps(forward)
        def too_much(*args, **kwargs):
            if trainer.state.global_step == 3:
                raise torch.OutOfMemoryError(OOM)
            return forward(*args, **kwargs)

        trainer.model.forward = too_much

    with pytest.raises(TrainingOutOfMemory) as end:
        train(tmp_path / "out", prepare=full, **fields)
    assert end.value.exit_code == 75
    report = json.loads((tmp_path / "out" / "oom_report.json").read_text())
    assert (report["step"], report["stage"], report["kind"]) == (3, "forward", "device")
    assert report["held_bytes"]["optimizer_states"] == pytest.approx(2 * report["held_bytes"]["parameters"], rel=0.01)
    assert report["held_bytes"]["gradients"] == 0
    assert report["reason"].startswith("it fitted for 3 steps")
    assert len(report["next"]) >= 1 and all(change["change"] for change in report["next"])
    assert report["checkpoint"].endswith("checkpoint-3")
    found = train(tmp_path / "out", resume=True, **fields)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_an_optimizer_that_never_fits_leaves_the_last_good_step(tmp_path):
    def full(trainer):
        step = torch.optim.AdamW.step

        def too_much(optimizer, *args, **kwargs):
            if trainer.state.global_step == 2:
                raise torch.OutOfMemoryError(OOM)
            return step(optimizer, *args, **kwargs)

        create = trainer.create_optimizer

        def create_optimizer(*args, **kwargs):
            optimizer = create(*args, **kwargs)
            optimizer.step = too_much.__get__(optimizer)
            return optimizer

        trainer.create_optimizer = create_optimizer

    with pytest.raises(TrainingOutOfMemory) as end:
        train(tmp_path, prepare=full)
    assert end.value.report["stage"] == "optimizer"
    assert end.value.report["checkpoint"].endswith("checkpoint-2")


# ---- data


def _data_fails(trainer):
    collate = trainer.data_collator

    def fails(rows):
        if trainer.state.global_step == 3 and trainer.is_in_train:
            raise MemoryError("Unable to allocate 3.00 GiB for an array with shape (1,)")
        return collate(rows)

    trainer.data_collator = fails


class WorkerIsKilled(Rows):
    """The system kills the data loading worker that asks for a sample, as it does for host memory."""

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None and index == 30:
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def _worker_is_killed(trainer):
    trainer.train_dataset = WorkerIsKilled()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "fields", "cause"),
    [
        (_data_fails, {}, "host memory ran out"),
        (_worker_is_killed, {"dataloader_num_workers": 1}, "the system killed a data loading worker"),
    ],
)
def test_data_that_run_out_of_memory_end_the_run_with_a_report(prepare, fields, cause, tmp_path):
    wanted = train(tmp_path / "plain", kind=Trainer)
    with pytest.raises(TrainingOutOfMemory, match="out of memory in data of step"):
        train(tmp_path / "out", prepare=prepare, **fields)
    report = json.loads((tmp_path / "out" / "oom_report.json").read_text())
    assert report["stage"] == "data" and report["cause"].startswith(cause)
    assert report["checkpoint"] == str(tmp_path / "out" / f"checkpoint-{report['step']}")
    assert torch.allclose(train(tmp_path / "out", resume=True).weights, wanted.weights, rtol=0, atol=1e-9)


def test_a_lost_connection_to_a_killed_worker_is_its_death(monkeypatch):
    """The connection may break before the signal comes that torch names the worker by: here at its third question."""
    from torch.utils.data._utils import signal_handling

    from hf_memopt.trainer.ending import worker_death

    asked = []

    def ask():
        asked.append(1)
        if len(asked) == 3:
            raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed.")

    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", ask)
    assert "killed by signal" in str(worker_death(ConnectionResetError(104, "Connection reset by peer")))
    assert len(asked) == 3
    unrelated = ValueError("a bug")
    assert worker_death(unrelated) is unrelated and len(asked) == 3


def test_weights_between_two_updates_are_saved(monkeypatch):
    worker, call = (SimpleNamespace(message=text) for text in ("DataLoader worker (pid 7) is killed", "out of memory"))
    for updating, in_backward, whole in itertools.product((False, True), repeat=3):
        monkeypatch.setattr(ending, "changes_weights_in_backward", lambda trainer, changes=in_backward: changes)
        monkeypatch.setattr(ending, "holds_whole_model", lambda trainer, whole=whole: whole)
        ended, own = [], SimpleNamespace(_trainer=None, updates=SimpleNamespace(running=updating))
        own.end_run = lambda stage, diagnosis, why, intact, ended=ended: ended.append((stage, why, intact))
        ending.Ending.end_run_outside_step(own, worker)
        ending.Ending.end_run_outside_step(own, call)
        ending.Ending.end_run_outside_step(own, call, "data")
        intact = whole and not updating and not in_backward
        between = ("callbacks", "no smaller micro-batch helps code between the steps", intact)
        loading = ("data", "no smaller micro-batch helps data loading", intact)
        assert ended == [loading, between, loading]


def _the_checkpoint_to_resume_from(own, intact, folder, monkeypatch):
    monkeypatch.setattr(ending, "holds_whole_model", lambda trainer: own.get("whole", True))
    state = own.get("state", SimpleNamespace(written=1))
    buffers = SimpleNamespace(written=lambda: own.get("written", 1))
    trainer = SimpleNamespace(
        args=SimpleNamespace(should_save=own.get("saves", True)),
        state=SimpleNamespace(global_step=own.get("step", 3)),
        is_in_train=own.get("in_train", True),
        _runner=SimpleNamespace(resume_state=state, buffers=buffers),
        emergency_checkpoint=lambda: own.get("written_now", "of this step"),
        newest_checkpoint=lambda: "the newest",
    )
    assert ending.Ending._checkpoint(SimpleNamespace(_trainer=trainer), intact) == folder


def test_the_checkpoint_to_resume_from(monkeypatch, subtests):
    for own, intact, folder in [
        ({}, True, "of this step"),
        ({"step": 1}, True, "of this step"),
        ({"step": 0}, True, "the newest"),
        ({}, False, "the newest"),
        ({"whole": False}, True, "of this step"),
        ({"saves": False}, False, "of this step"),  # random states, which no update changes
        ({"saves": False, "step": 0}, True, "of this step"),
        ({"saves": False, "whole": False}, True, "the newest"),
        ({"in_train": False}, True, "the newest"),
        ({"written": 2}, True, "the newest"),
        ({"state": None}, True, "the newest"),
        ({"written_now": None}, True, "the newest"),  # it could not be saved
    ]:
        with subtests.test(own=str(own), intact=str(intact)):
            _the_checkpoint_to_resume_from(own, intact, folder, monkeypatch)


def _random_states_that_a_process_saves(states, saves, saved):
    written = []
    own = SimpleNamespace(
        _runner=SimpleNamespace(resume_states=states),
        state=SimpleNamespace(global_step=3),
        args=SimpleNamespace(should_save=saves),
        unfinished=lambda step: step,
        _save_rng_state=written.append,
    )
    MemoryTrainer._save_random_states(own)
    assert written == saved


def test_random_states_that_a_process_saves(subtests):
    for states, saves, saved in [
        ({2: None, 3: None}, True, ["3"]),
        ({2: None, 3: None}, False, ["2", "3"]),
        ({}, True, ["3"]),
    ]:
        with subtests.test(states=str(states), saves=str(saves)):
            _random_states_that_a_process_saves(states, saves, saved)


def _the_samples_of_a_micro_batch_are_found_in_the_epochs_order(step, number, batch, monkeypatch):
    order = "hf_memopt.trainer.trainer.batch_order"
    monkeypatch.setattr(order, lambda loader, epoch: iter([epoch + 1, place] for place in range(5)))
    args, state = SimpleNamespace(gradient_accumulation_steps=2), SimpleNamespace(global_step=step)
    own, micro = SimpleNamespace(_train_loader=range(5), args=args, state=state), SimpleNamespace(number=number)
    assert MemoryTrainer._dataset_indices(own, micro) == batch
    own._train_loader = iter(())
    assert MemoryTrainer._dataset_indices(own, micro) is None
    own._train_loader = range(5)
    monkeypatch.setattr(order, lambda loader, epoch: None)
    assert MemoryTrainer._dataset_indices(own, micro) is None


def test_the_samples_of_a_micro_batch_are_found_in_the_epochs_order(monkeypatch, subtests):
    """Of five batches an epoch, two a step."""
    for step, number, batch in [
        (0, 0, [1, 0]),
        (1, 1, [1, 3]),
        (2, 0, [1, 4]),
        (2, 1, None),
        (3, 0, [2, 0]),
        (4, 1, [2, 3]),
    ]:
        with subtests.test(step=str(step), number=str(number)):
            _the_samples_of_a_micro_batch_are_found_in_the_epochs_order(step, number, batch, monkeypatch)


def test_a_callback_that_runs_out_of_memory_ends_the_run_with_a_report(tmp_path):
    class Average(TrainerCallback):
        """An average of the weights, for which there is no room from the third step on."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise torch.OutOfMemoryError(OOM)

    with pytest.raises(TrainingOutOfMemory, match="out of memory in callbacks of step 4"):
        train(tmp_path, prepare=lambda trainer: trainer.add_callback(Average()))
    assert json.loads((tmp_path / "oom_report.json").read_text())["checkpoint"] == str(tmp_path / "checkpoint-3")


@pytest.mark.slow
def test_clipping_that_never_fits_ends_the_run(tmp_path):
    def fails(trainer):
        def always(*args, **kwargs):
            raise torch.OutOfMemoryError(OOM)

        trainer.accelerator.clip_grad_norm_ = always

    with pytest.raises(TrainingOutOfMemory, match="out of memory in clipping of step 1"):
        train(tmp_path, prepare=fails)


# ---- endings


@pytest.mark.slow
def test_the_end_can_be_caught(tmp_path):
    """A sweep continues with its next trial; a program that run() starts ends with the code for relaunchers."""
    assert issubclass(TrainingOutOfMemory, Exception)
    with pytest.raises(SystemExit) as ended:
        run(lambda: train(tmp_path, Strikes({"forward": set(range(1, 10**4))})))
    assert ended.value.code == 75


def test_the_last_step_is_saved_before_it_is_explained(tmp_path, monkeypatch):
    """An explanation takes an estimate, which may take long or fail, while other processes wait."""
    from hf_memopt.trainer import ending

    def slow(*args):
        assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()
        raise KeyError("explaining failed")

    monkeypatch.setattr(ending, "describe_failure", slow)
    with pytest.raises(KeyError, match="explaining failed"):
        train(tmp_path, prepare=lambda trainer: _fails_from_step(trainer, 2))


def _fails_from_step(trainer, step: int):
    forward = trainer.model.forward

    @wraps(forward)
    def too_much(*args, **kwargs):
        if trainer.state.global_step >= step:
            raise torch.OutOfMemoryError(OOM)
        return forward(*args, **kwargs)

    trainer.model.forward = too_much


@pytest.mark.slow
def test_the_checkpoint_of_an_older_run_is_not_called_this_ones(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    old = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"][0]["exp_avg"]
    with pytest.raises(TrainingOutOfMemory) as end:
        train(tmp_path, prepare=lambda trainer: _fails_from_step(trainer, 2), seed=3, learning_rate=0.5)
    assert end.value.report["checkpoint"].endswith("checkpoint-2")
    new = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"][0]["exp_avg"]
    assert not torch.equal(old, new)


def test_torchrun_ends_in_the_sentence(tmp_path, monkeypatch):
    """Its table, which is the last thing printed, has a line for what a process left in this file."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def refuses():
        raise InputError("max_length=-3 must be at least 2")

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit) as end:
        run(refuses)
    table = str(ChildFailedError("recipe.py", {0: ProcessFailure(0, 1, end.value.code, str(file))}))
    assert table.rstrip("=\n").endswith("error: max_length=-3 must be at least 2")
