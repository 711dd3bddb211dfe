"""Checkpoints of MemoryTrainer: saves that fail, that are tried early, and runs that are killed at any moment."""

import itertools
import json
import os
from types import SimpleNamespace

import killed_run
import pytest
import torch
from conftest import run_forked, slow
from small_runs import OOM, same, train
from transformers import Trainer

from hf_memopt import InputError, MemoryTrainer
from hf_memopt.trainer.checkpoints import saving
from hf_memopt.trainer.checkpoints.intact import MANIFEST, _changed, _entry, write_manifest
from hf_memopt.trainer.checkpoints.resuming import SafeResume
from hf_memopt.trainer.checkpoints.sharded_states import states_saved_here
from hf_memopt.trainer.step.batch_limit import BatchLimit


def _saves_fail(times: int):
    def prepare(trainer):
        save, left = trainer.save_model, [times]

        def failing(*args, **kwargs):
            save(*args, **kwargs)
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError(OOM)

        trainer.save_model = failing

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize(("times", "checkpoints"), [(1, [2, 4, 5]), slow(2, [4, 5])])
def test_a_save_that_fails_is_done_again_or_left_out(times, checkpoints, tmp_path):
    fields = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    wanted = train(tmp_path / "plain", kind=Trainer, **fields)
    found = train(tmp_path / "out", prepare=_saves_fail(times), **fields)
    same(found, wanted)
    assert [event["stage"] for event in found.events] == ["save"] * times
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert names == [f"checkpoint-{step}" for step in checkpoints]  # the Trainer saves the last step, whatever it is


@pytest.mark.slow
def test_saving_is_tried_after_the_first_step(tmp_path):
    """probe_save: a checkpoint although none is due; without room for it the run ends at once."""
    found = train(tmp_path / "out", memory={"probe_save": True}, max_steps=3)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not found.events

    def full(trainer):
        def fail(*args, **kwargs):
            raise OSError(28, "No space left on device")

        trainer.save_model = fail

    with pytest.raises(InputError, match=r"probe_save: no checkpoint can be written to .* No space left on device"):
        train(tmp_path / "full", memory={"probe_save": True}, prepare=full, max_steps=3)
    with pytest.raises(InputError, match="probe_save: not enough memory to write a checkpoint"):
        train(tmp_path / "small", memory={"probe_save": True}, prepare=_saves_fail(2), max_steps=3)


@pytest.mark.slow
def test_best_and_rotation_work_as_in_the_trainer(tmp_path):
    fields = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 4,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
    }
    states = {}
    for name, kind in (("plain", Trainer), ("memory", MemoryTrainer)):
        train(tmp_path / name, kind=kind, **fields)
        kept = sorted(path.name for path in (tmp_path / name).glob("checkpoint-*"))
        state = json.loads((tmp_path / name / kept[-1] / "trainer_state.json").read_text())
        states[name] = kept, state["best_global_step"], os.path.basename(state["best_model_checkpoint"])
        assert os.path.isdir(state["best_model_checkpoint"])
    assert states["plain"] == states["memory"]


@pytest.mark.slow
def test_the_effective_batch_is_kept_under_another_world_size(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    state = tmp_path / "checkpoint-2" / "memory_state.json"
    before = json.loads(state.read_text())
    assert before["effective_batch_size"] == 8 and before["world_size"] == 1
    (tmp_path / "checkpoint-2" / "memory_manifest.json").unlink()  # which notices what is edited here
    # As if four processes with accumulation 1 had saved it: one process has to accumulate four times.
    state.write_text(json.dumps({**before, "effective_batch_size": 16, "world_size": 4}))
    found = train(tmp_path, resume=True, max_steps=4)
    (event,) = found.events
    assert event["gradient_accumulation_steps"] == 4
    state.write_text(json.dumps({**before, "effective_batch_size": 6, "world_size": 3}))
    with pytest.raises(InputError, match="effective batch size is 6"):
        train(tmp_path, resume=True, max_steps=4)


@pytest.mark.slow
def test_killed_at_any_moment_the_loss_curve_goes_on(tmp_path):
    wanted = train(tmp_path / "plain", **killed_run.FIELDS).logs
    done = run_forked("python", killed_run.__file__, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["kills"] >= 1 and result["losses"] == wanted


def _a_run_starts_with_the_chunk_that_fitted(noted, elements, tmp_path):
    file = tmp_path / "memory_state.json"
    file.write_text(json.dumps({"effective_batch_size": 8, "world_size": 1, "piece_elements": noted}))
    trainer = SimpleNamespace(limit=BatchLimit(3), args=None, _effective_batch_size=lambda: 8)
    SafeResume._keep_effective_batch(trainer, file)
    assert trainer.limit.elements == elements


def test_a_run_starts_with_the_chunk_that_fitted(tmp_path, subtests):
    for noted, elements in [(64, 64), (1, 1), (0, None), (-8, None), ("64", None)]:
        with subtests.test(noted=str(noted), elements=str(elements)):
            _a_run_starts_with_the_chunk_that_fitted(noted, elements, tmp_path)


def test_a_manifest_lists_every_file_but_itself(tmp_path):
    (tmp_path / "states").mkdir()
    for name in ("model.safetensors", "states/one"):
        (tmp_path / name).write_bytes(b"12345")
    for _ in range(2):  # the second finds the first one's
        write_manifest(tmp_path)
        files = json.loads((tmp_path / MANIFEST).read_text())["files"]
        assert files.keys() == {"model.safetensors", "states/one"} and {row["bytes"] for row in files.values()} == {5}


def test_what_differs_from_a_manifest_is_named(tmp_path):
    file = tmp_path / "one"
    file.write_bytes(b"12345")
    entry = _entry(file)
    for listed, says in (
        (entry, ""),
        ({**entry, "bytes": 4}, "one has 5 bytes, and 4 were written"),
        (7, "one has 5 bytes, and 7 were written"),
        ({}, "one has 5 bytes, and None were written"),
    ):
        assert _changed(file, "one", listed) == says
    file.write_bytes(b"12346")
    assert "one" in _changed(file, "one", entry) and _changed(tmp_path / "two", "two", entry) == "no two"


def test_states_are_saved_beside_models_that_transformers_shards():
    args = SimpleNamespace(save_only_model=False)
    for model, within in (
        (None, False),
        (SimpleNamespace(), False),
        (SimpleNamespace(is_distributed_loading_by_transformers=False), False),
        (SimpleNamespace(is_distributed_loading_by_transformers=True), True),
    ):
        with states_saved_here(model, args):
            assert args.save_only_model is within
        assert args.save_only_model is False
    with states_saved_here(SimpleNamespace(is_distributed_loading_by_transformers=True)):
        pass


def _who_moves_a_checkpoint_to_its_place(saves, local_main, written, tmp_path, monkeypatch):
    calls = []
    folder = tmp_path / saving.UNFINISHED / "checkpoint-7"
    if written != "nothing":
        folder.mkdir(parents=True)
    if written == "all of it":
        (folder / "trainer_state.json").write_text("{}")
    monkeypatch.setattr(saving, "write_manifest", lambda path: calls.append(("manifest", path)))
    monkeypatch.setattr(saving, "_replace", lambda source, target: calls.append(("moved", source, target)))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(wait_for_everyone=lambda: None, is_local_main_process=local_main),
        args=SimpleNamespace(should_save=saves),
        state=SimpleNamespace(global_step=7, best_global_step=7, best_model_checkpoint=None),
        _get_output_dir=lambda trial: str(tmp_path),
        _finish=lambda source, target: calls.append(("finished", source, target)),
        _rotate=lambda run: calls.append(("rotated", run)),
    )
    saving.SafeCheckpoints._move_to_its_place(trainer, None)
    place = tmp_path / "checkpoint-7"
    own = local_main and not saves and written == "shards"
    expected = [("finished", folder, place)] * saves
    expected += [("manifest", folder), ("moved", folder, place)] * own
    assert calls == expected + [("rotated", tmp_path)] * (saves or own)
    assert trainer._newest == place and trainer.state.best_model_checkpoint == str(place)


def test_who_moves_a_checkpoint_to_its_place(tmp_path, monkeypatch, subtests):
    """The process that saves; and on a node with a disk of its own, which has no trainer_state.json, its first one."""
    for saves, local_main, written in itertools.product(
        [True, False], [True, False], ["nothing", "shards", "all of it"]
    ):
        with subtests.test(saves=saves, local_main=local_main, written=written):
            _who_moves_a_checkpoint_to_its_place(
                saves, local_main, written, tmp_path / f"{saves} {local_main} {written}", monkeypatch
            )
